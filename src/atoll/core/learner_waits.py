"""How long a learner waits for what, in every world. Nanoseconds; each line says where its number comes from."""

from __future__ import annotations

from atoll.core.config import SECOND_NS

HEARTBEAT_NS = 2 * SECOND_NS
"""Said when nothing else is: well inside the 15 s lease, and small enough for any link."""
RETRY_NS = SECOND_NS // 2
"""Pause after a transfer that the wire gave up on, before it is tried again."""
JOIN_TIMEOUT_NS = 120 * SECOND_NS
"""How long joining may take without any progress: a syncer that still starts. Parameters on a thin link have more."""
CLOSE_TIMEOUT_NS = 15 * SECOND_NS
"""How long leaving may take to hand over what is left. Below the syncer's own patience at a stop."""
LET_GO_NS = 5 * SECOND_NS
"""How long a learner that has left waits for the syncer's word that all is on disk. With CLOSE_TIMEOUT_NS this is the
bound that is promised for leaving: 20 s."""
INNER_WAIT_NS = 20 * SECOND_NS
"""How long a joiner waits for a peer's inner state before it trains without: 250 MB at 100 Mbit/s."""
SYNC_WAIT_NS_MAX = 600 * SECOND_NS
"""Synchronous runs only: after this long without a merge the learner goes on alone, with a warning."""
WAIT_SLICE_NS = SECOND_NS // 2
"""A waiting training thread looks up this often, so that Ctrl-C works and a dead link is noticed."""
SLOW_FETCH_NS = SECOND_NS
"""A fetch that takes longer than any round trip says that the link is full: then there is one at a time."""
INLINE_NS_MAX = SECOND_NS // 2
"""A contribution on the control connection that is answered later than this stands in front of everything that the
syncer must hear of this learner: 64 KiB take so long at 1 Mbit/s."""

FETCHES_MAX = 4
"""Fetches at a time: as many as fill a long link. All fragments side by side would all arrive as late as the last."""
UPDATES_KEPT = 4
"""Small updates of one fragment that came with their notices and wait to be prepared."""
INNER_TRIES = 10
"""Attempts for one piece of inner state while the other side is busy: each waits on the syncer for some 20 s."""
