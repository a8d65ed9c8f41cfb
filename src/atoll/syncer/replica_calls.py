"""What a primary says to the standby that it replicates to (the link itself is `wire.shard_peer`).

    primary -> standby
      replicate   who leads; the standby says what it holds       rows      facts of the tape, all or what is new
      commit      every array of one version of a fragment        filled    all of it was sent
      handed, dropped   what a leaving learner handed over        beat      the primary lives
      ended       the primary has ended in order
    standby -> primary
      leave       the standby ends in order, and will not take over

An answer means that it is on the standby's disk. Both sides run the same version of atoll.
"""

from __future__ import annotations

REPLICATE, ROWS, COMMIT, FILLED = "replicate", "rows", "commit", "filled"
HANDED, DROPPED, BEAT, ENDED, LEAVE = "handed", "dropped", "beat", "ended", "leave"

LINK_VERSION = 1
"""Of what is said here. Both sides must have the same."""
REPLICA_ROW = "replica"
"""On the tape of a standby: which primary it follows, and whether it may take its place. The primary's rows never have
it."""
