"""Every bound of the wire, by name, each with where its number comes from.

Rules of this file: constants only. A queue, message, wait or retry anywhere in `wire` uses one of these.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# ---------------------------------------------------------------- what a message may hold

ID_CHARS_MAX = 200
"""Learner ids, run names, codec names: longer ones would not fit a terminal column or a file name (255 bytes)."""
TENSOR_NAME_CHARS_MAX = 1000
"""Dotted module paths; the longest in the Hugging Face zoo are below 200."""
TEXT_CHARS_MAX = 4000
"""Reasons and refusal details: a paragraph for a person."""
JSON_CHARS_MAX = 1 * MIB
"""The settings (about 1 KiB) and the status document (about 200 bytes per learner, for thousands of learners)."""
TENSORS_MAX = 1_000_000
"""A 1000-layer mixture of experts with 256 experts has 800 thousand tensors when each expert keeps its own."""
DIMENSIONS_MAX = 64
"""PyTorch's own limit on the number of dimensions."""
OUTSTANDING_MAX = 65_536
"""Contributions with unknown fate: a few for each of at most 4096 fragments."""
DISCARDS_MAX = 65_536
"""One count per fragment and cause: 4096 fragments, a handful of causes."""
INNER_PIECES_MAX = 2**20
"""Pieces of one learner's inner state: at 8 MiB each 8 TiB, which is Adam's state of 10^12 parameters in fp32."""
COUNT_MAX = 2**62
"""Counters, versions, rounds and nanoseconds stay far inside int64, so that sums of two cannot overflow it."""

# ---------------------------------------------------------------- control

CONTROL_MESSAGE_BYTES_MAX = 128 * MIB
"""A Hello with a million tensors of about 100 bytes each; every other control message is below 1 MiB."""
UNWEIGHED_BYTES_MAX = 4 * MIB
"""Messages up to this are parsed as they are: protobuf takes at most some 40 times their size. A Progress with all its
discards has 2.3 MiB."""
FIELD_BYTES_MAX = 256 * KIB
"""One field of a larger message, which is a Hello: a tensor's name and shape, or 4096 versions of at most 10 bytes."""
SYNCER_MESSAGE_BYTES_MAX = 8 * MIB
"""From the syncer: JSON_CHARS_MAX of settings at 4 bytes each, and some more."""
SESSION_QUEUE_BYTES_MAX = 4 * MIB
"""Outgoing bytes that wait for one learner: published notices (about 60 bytes) for 4096 fragments 16 times over. More
means that the learner does not read: it is closed, and catches up by fetching when it comes back."""
LEARNER_QUEUE_MAX = 16_384
"""Outgoing messages of a learner while it is connected. Progress is coalesced and the rest answers requests, one per
fragment (4096): four times that."""
SESSIONS_MAX = 10_000
"""Control sessions of one syncer: file descriptors (four per learner at most) stay below the usual limit of 65 536."""
CONNECT_S = 10.0
"""One attempt to connect: several round trips of a 300 ms link, with packet loss."""
HELLO_S = 60.0
"""The Hello (at most CONTROL_MESSAGE_BYTES_MAX) and its Welcome over a thin link: 128 MiB at 20 Mbit/s."""
FLUSH_S = 5.0
"""How long a leaving side waits for its last control messages (a Leave, a Stop) to go out."""
SESSION_SILENCE_S = 30.0
"""A learner says something every 2 s (its heartbeat). One that is not heard for two leases may have a connection that
is fine and a stream that is dumb: a damaged length makes all that follows look like part of one long message."""
STATUS_S = 10.0
"""A status call, or the request that a learner leave: small, local to the syncer's memory."""
PROBE_S = 3.0
"""Looking for the cause of a failed connection: several round trips of a 300 ms link for each of its few steps. With
the second that a learner waits before it looks, the first cause is told within 5 s."""
PROBE_ADDRESSES_MAX = 4
"""Of the addresses behind one name, those that are tried: IPv6 and IPv4 of two machines."""

# ---------------------------------------------------------------- connections

KEEPALIVE_TIME_MS = 5_000
"""A silent connection is pinged this often. With the control timeout a dead one is noticed within a lease, 15 s."""
CONTROL_KEEPALIVE_TIMEOUT_MS = 10_000
BULK_KEEPALIVE_TIMEOUT_MS = 300_000
"""A ping on a bulk connection waits behind what the kernel has buffered: a part (1 MiB) takes as long at 28 kbit/s.
Whether the other side lives is known from the control connection, and with it all transfers end."""
KEEPALIVE_ACCEPTED_MS = 1_000
"""The server takes pings this often without calling it abuse (gRPC's own default of 5 minutes would end sessions)."""
RPCS_MAX = 32_768
"""Calls at a time on one server: a session and two transfers for each of SESSIONS_MAX learners."""

# ---------------------------------------------------------------- reconnecting

ADDRESSES_MAX = 8
"""Places where a learner looks for its syncer. One that swallows packets costs CONNECT_S, so a round stays below the
2 minutes that joining has."""
BACKOFF_S_MIN = 0.1
"""A restarted syncer on the same machine is back within a few of these."""
BACKOFF_S_MAX = 5.0
"""A learner that reconnects is useful within one sync period; a thousand learners at 5 s are 200 connections/s."""
BACKOFF_FACTOR = 2.0
BACKOFF_JITTER = 0.5
"""Each wait is multiplied by a random number in [1 - this, 1], so that learners that lost one syncer spread out."""

# ---------------------------------------------------------------- bulk

PART_BYTES = 1 * MIB
"""Data in one part. Measured in benchmarks/transfer.py: see docs/results/transfer.md."""
PART_BYTES_MIN = 64 * KIB
"""The smallest size that a transfer may be cut into, so that the table of received parts stays small."""
PART_BYTES_MAX = 4 * MIB
"""The largest part that is accepted from others."""
PUSH_BYTES_MAX = 64 * GIB
"""One payload. A fragment of a 100B-parameter model in fp32 at P=24 is 17 GB; the layout's own size is checked as well,
before anything is allocated."""
STRIPES_DEFAULT = 2
"""A second connection halves what a lost packet costs on a long link; over loopback it brings nothing (measured)."""
STRIPES_MAX = 16
"""Connections for one payload. More do not help: 16 windows of 8 MiB fill 10 Gbit/s at 100 ms."""
STRIPE_BYTES_MIN = 4 * MIB
"""A payload is split only into pieces of at least this: below it the extra round trips cost more than they bring."""
POOLED_BYTES_MIN = 1 * MIB
"""Smaller receive buffers come from the C heap, which reuses memory by itself."""
POOL_BYTES_MAX = 512 * MIB
"""Receive buffers kept for reuse: two payloads of benchmarks/transfer.py. What is beyond is simply freed."""
TRANSFERS_MAX = 1024
"""Assembly buffers at a time. Each is bounded by what the syncer expects for its fragment."""
TRANSFERS_PER_LEARNER_MAX = 64
"""One learner has a contribution for each round in flight, and the seeding one sends all fragments in turn."""
TRANSFER_IDLE_S = 300.0
"""A transfer for which nothing arrives this long is freed: one part (1 MiB) at 28 kbit/s."""
PART_S = 300.0
"""A fetching learner that takes longer for one more part, likewise, is told of in the syncer's log. How long it may
take is its own deadline; a dead connection is noticed much earlier."""
BULK_ATTEMPTS_MAX = 6
"""Attempts of one push or fetch in a row without any progress before the caller hears of it; the learner trains on."""
BULK_DEADLINE_S_MIN = 30.0
"""Deadline of an empty transfer: connecting, queueing behind a merge, and the answer."""
BULK_RATE_MIN = 2 * KIB
"""Bytes/s below which a link is called dead: 16 kbit/s, so that a learner at 50 may move three things at once.
Deadline = minimum + wait + size / rate, where the wait is one of the next two for inner state and 0 for all else."""
INNER_RATE_MIN = 64 * KIB
"""The same for inner state, which is given up on a link that is too thin for it: a joiner can train without."""
PUSH_WAIT_S = 180.0
"""Longest that a service may hold back the answer to a complete piece of inner state, until there is room for the next
one: the joiner needs 134 s for a piece (8 MiB) at that rate."""
FETCH_WAIT_S = 60.0
"""Longest that a service may take to begin with a piece of inner state that has not come in yet. A donor on a link
thinner than 1.2 Mbit/s takes longer for a piece: the service then refuses as busy, and the joiner asks again."""
