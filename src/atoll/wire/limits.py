"""Every bound of the wire, by name, each with where its number comes from.

Rules of this file: constants only. A queue, message, wait or retry anywhere in `wire` uses one of these.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# ---------------------------------------------------------------- what a message may hold

LEARNER_CHARS_MAX = 64
"""Learner ids: they are in every row, event and message. A host name has at most 63 characters."""
SHARDS_MAX = 1024
"""Shards of one run. The largest models have 4096 fragments, and a shard has some of them."""
SECRET_CHARS_MAX = 64
"""Of a session's secret: 128 bits in hexadecimal are 32."""
ID_CHARS_MAX = 200
"""Run names, codec names: longer ones would not fit a terminal column or a file name (255 bytes)."""
TENSOR_NAME_CHARS_MAX = 1000
"""Dotted module paths; the longest in the Hugging Face zoo are below 200."""
TEXT_CHARS_MAX = 4000
"""Reasons and refusal details: a paragraph for a person."""
JSON_CHARS_MAX = 1 * MIB
"""The settings (about 1 KiB) and the status document (about 200 bytes per learner, for thousands of learners)."""
TENSORS_MAX = 1_000_000
"""A 1000-layer mixture of experts with 256 experts has 800 thousand tensors when each expert keeps its own."""
CODECS_MAX = 256
"""Codecs that a build knows: ten of its own, and a user's."""
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

HELLO_BYTES_MAX = 128 * MIB
"""A Hello with a million tensors of about 100 bytes each."""
MESSAGE_BYTES_MAX = 8 * MIB
"""One message to the syncer: twice the largest part, and 3 times the largest control message but Hello, which comes in
pieces. gRPC has one limit for all methods, and holds as much for every call that has begun a message."""
HELLO_PIECE_BYTES = 4 * MIB
LARGE_HELLOS_MAX = 2
"""Hellos of several pieces that are read at a time. Only the first learner of a run must list its tensors."""
UNWEIGHED_BYTES_MAX = 4 * MIB
"""Messages up to this are parsed as they are: protobuf takes at most some 40 times their size. A Progress with all its
discards has 2.3 MiB."""
HELLO_INLINE_BYTES_MAX = 256 * KIB
"""A Hello up to this is parsed on the event loop: some 2,500 tensors, 10 ms. A larger one is parsed on a thread."""
HELLO_BYTES_HELD_MAX = 2 * HELLO_BYTES_MAX
"""Of larger Hellos, waiting for that thread: the one in hand, and one more of the largest size. Protobuf takes several
times as much for the one in hand. In protocol 3 only the first learner sends a list of tensors."""
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
"""The Hello (at most HELLO_BYTES_MAX) and its Welcome over a thin link: 128 MiB at 20 Mbit/s."""
FLUSH_S = 5.0
"""How long a leaving side waits for its last control messages (a Leave, a Stop) to go out."""
SESSION_SILENCE_S = 30.0
"""A learner says something every 2 s (its heartbeat). One that is not heard for two leases may have a connection that
is fine and a stream that is dumb: a damaged length makes all that follows look like part of one long message."""
STATUS_S = 10.0
"""A status call, or the request that a learner leave: small, local to the syncer's memory."""
LINK_PROBE_BYTES = 512 << 10
"""What `atoll doctor` sends each way to see how fast a link is: 5 s of 1 Mbit/s, and half of what a status may have."""
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
CALLS_MAX = 32_768
"""Calls with the token at a time on one server: a session and two transfers for each of SESSIONS_MAX learners."""
STREAMS_MAX = 32
"""Calls at a time on one connection. A learner has one session on its control connection, five fetches on a bulk one,
and on that for pushes its contributions in flight and, where it gives its inner state, a piece for each of 16 joiners,
which the syncer may hold back (PUSH_WAIT_S). gRPC lets further ones wait on the learner's side."""
REQUEST_S = 60.0
"""A request (some hundred bytes) after its headers, which come in the same packet: as long as a Hello has."""
METADATA_BYTES_MAX = 8 * KIB
"""Headers of a call: the token has 200 characters, gRPC's own are below 1 KiB."""
CONNECTIONS_MAX = 50_000
"""Of SESSIONS_MAX learners: one for control, and two each way for bulk."""
DESCRIPTORS_RESERVED = 256
"""Kept from connections: the store has two files for each of its writers, a tape, a recording and the run's lock;
events and logs; gRPC's own; a snapshot to an object store has some tens of connections. Four times that."""
STRANGER_S = 60.0
"""A connection that has not shown the token for this long is closed: six times what a learner gives one attempt to
connect, because on a thin link a handshake (5 kB) stands in line with parts."""
STRANGERS_PER_NETWORK_MAX = 256
"""Connections from one address (of IPv6: one network of 64 bits) that have not shown the token. Learners that come back
together spread over BACKOFF_S_MAX, and each is a stranger for some round trips: a thousand behind one address at 300 ms
are 200 at a time. More than this lose only their oldest, and try again."""
STRANGERS_MAX = 1024
"""The same in all. Each costs the syncer some 10 KiB, with TLS some 50 KiB."""
REFUSALS_MAX = 16
"""Calls without the right token on one connection before it is closed: a learner stops at the first."""
LOOK_S = 1.0
"""How often the syncer looks who stands at its door: a flood of strangers is trimmed within two."""
LOOK_SHARE = 0.05
"""Of one processor, at most, for looking: tens of thousands of descriptors are looked at less often."""
PLACES_KEPT = 4096
"""Addresses whose text is remembered between two looks."""
TOLD_EVERY_S = 60.0
"""Strangers are told of in the log this often, whatever they do."""

# ---------------------------------------------------------------- coordinator and shards

SHARD_PART_BYTES = 1 * MIB
"""Of a message between them in one frame: small calls then never wait long behind a fragment that is copied."""
SHARD_JSON_BYTES_MAX = 256 * MIB
"""The JSON of one message: a million tensors of about 100 bytes each, twice."""
SHARD_MESSAGES_MAX = 4096
"""Messages that wait for the link: one for each of at most 4096 fragments. More means that the other side is stuck."""
SHARD_CALLS_MAX = 4 * SHARD_MESSAGES_MAX
"""Messages that are under way or being answered on this side: a push of each fragment, and what follows from it."""
SHARD_ATTACH_S = 300.0
"""A shard that is attached reads its slots first: 12 GB (1B parameters) take a minute."""

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
TRANSFER_MEMORY_SHARE = 0.5
"""Of the machine's memory, at most, for payloads that come in: the rest has the run's state, which is many times a
round of contributions."""
TRANSFER_LEARNER_SHARE = 0.25
"""Of that, at most, for one learner: four that stand still in the middle of everything lock nobody out."""
FETCHES_PER_LEARNER_MAX = 64
"""Fetches of one learner at a time: four, over STRIPES_MAX connections. Each holds one part in memory."""
FETCHES_MAX = 4096
"""Fetches at a time of all learners: two each, for two thousand that hear of a version together."""
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

DIRECT_BYTES_MIN = 1 * MIB
"""Payloads of this size and more go past gRPC, where the server offers that. One more round trip (the leave to send)
and two turns of a thread are then small beside the bytes."""
DIRECT_CONNECTIONS_MAX = 512
"""Connections past gRPC at a time on one server, half of those at most that it has descriptors for. Each has a thread
(some 50 KiB), and may have one part under way. Whoever finds no room uses gRPC."""
DIRECT_STRANGERS_MAX = 64
"""Those among them that have not shown their token: beyond it the oldest goes. An honest one is a stranger for two
round trips, and one that loses its place uses gRPC."""
DIRECT_PER_CLIENT_MAX = 8
"""Connections past gRPC of one learner to one server: five fetches and its pushes, as over gRPC, seldom at once."""
DIRECT_FRAME_BYTES_MAX = 16 * KIB
"""A header has some hundred bytes, a token 200, a refusal at most 8 KiB."""
DIRECT_IDLE_S = 600.0
"""A connection on which nothing was asked for this long is closed; the learner opens another when it needs one."""
DIRECT_KEEPALIVE_S = 60
"""A silent connection is asked whether the other side is there."""
DIRECT_ENDING_S = 1.0
"""How long the end of a stripe may take once the whole is decided, before its connection is cut."""
DIRECT_FAULTS_MAX = 2
"""Transfers in a row that break past gRPC before the learner stays with gRPC until its next session. One that stands
still (DIRECT_STALL_S) is enough."""
DIRECT_STALL_S = BULK_KEEPALIVE_TIMEOUT_MS / 1000
"""A learner gives up a connection past gRPC on which nothing moved between two looks, so far apart: as gRPC does."""

RELAY_LOOK_S = 20.0
"""How often a learner that had to go past its relay looks whether that is back: a restart takes some seconds, and until
then the site's link carries its bytes on their own."""
RELAY_LOOK_S_MAX = 640.0
"""The same, where returns did not last."""
