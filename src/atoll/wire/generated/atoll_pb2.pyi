from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PushKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PUSH_UNSPECIFIED: _ClassVar[PushKind]
    PUSH_CONTRIBUTION: _ClassVar[PushKind]
    PUSH_SEED: _ClassVar[PushKind]
    PUSH_HEAL: _ClassVar[PushKind]
    PUSH_INNER: _ClassVar[PushKind]

class FetchKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FETCH_UNSPECIFIED: _ClassVar[FetchKind]
    FETCH_UPDATE: _ClassVar[FetchKind]
    FETCH_THETA: _ClassVar[FetchKind]
    FETCH_INNER: _ClassVar[FetchKind]
PUSH_UNSPECIFIED: PushKind
PUSH_CONTRIBUTION: PushKind
PUSH_SEED: PushKind
PUSH_HEAL: PushKind
PUSH_INNER: PushKind
FETCH_UNSPECIFIED: FetchKind
FETCH_UPDATE: FetchKind
FETCH_THETA: FetchKind
FETCH_INNER: FetchKind

class LearnerMessage(_message.Message):
    __slots__ = ("hello", "ready", "progress", "nothing", "leave", "contribution", "data_report")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    LEAVE_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    DATA_REPORT_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    progress: Progress
    nothing: Nothing
    leave: Leave
    contribution: Contribution
    data_report: DataReport
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., nothing: _Optional[_Union[Nothing, _Mapping]] = ..., leave: _Optional[_Union[Leave, _Mapping]] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., data_report: _Optional[_Union[DataReport, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("learner", "instance", "protocol", "tensors", "generation", "run", "bases", "outstanding", "epoch", "checksums", "wants_inner", "frozen")
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    WANTS_INNER_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    learner: str
    instance: str
    protocol: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    generation: int
    run: str
    bases: _containers.RepeatedScalarFieldContainer[int]
    outstanding: _containers.RepeatedCompositeFieldContainer[Outstanding]
    epoch: int
    checksums: _containers.RepeatedScalarFieldContainer[int]
    wants_inner: bool
    frozen: int
    def __init__(self, learner: _Optional[str] = ..., instance: _Optional[str] = ..., protocol: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., generation: _Optional[int] = ..., run: _Optional[str] = ..., bases: _Optional[_Iterable[int]] = ..., outstanding: _Optional[_Iterable[_Union[Outstanding, _Mapping]]] = ..., epoch: _Optional[int] = ..., checksums: _Optional[_Iterable[int]] = ..., wants_inner: _Optional[bool] = ..., frozen: _Optional[int] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype", "merge")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    merge: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., merge: _Optional[str] = ...) -> None: ...

class Outstanding(_message.Message):
    __slots__ = ("fragment", "seq")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    seq: int
    def __init__(self, fragment: _Optional[int] = ..., seq: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("step", "bases")
    STEP_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    step: int
    bases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., bases: _Optional[_Iterable[int]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("step", "steps", "tokens", "step_ns", "loss", "bases", "discarded", "pending")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_NS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    DISCARDED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    tokens: int
    step_ns: int
    loss: float
    bases: _containers.RepeatedScalarFieldContainer[int]
    discarded: _containers.RepeatedCompositeFieldContainer[DiscardCount]
    pending: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., step_ns: _Optional[int] = ..., loss: _Optional[float] = ..., bases: _Optional[_Iterable[int]] = ..., discarded: _Optional[_Iterable[_Union[DiscardCount, _Mapping]]] = ..., pending: _Optional[_Iterable[int]] = ...) -> None: ...

class DiscardCount(_message.Message):
    __slots__ = ("fragment", "cause", "tokens")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    cause: str
    tokens: int
    def __init__(self, fragment: _Optional[int] = ..., cause: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class Nothing(_message.Message):
    __slots__ = ("round", "fragment")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    fragment: int
    def __init__(self, round: _Optional[int] = ..., fragment: _Optional[int] = ...) -> None: ...

class Leave(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("header", "payload")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    payload: bytes
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., payload: _Optional[bytes] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("chunk", "start")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    chunk: int
    start: int
    def __init__(self, chunk: _Optional[int] = ..., start: _Optional[int] = ...) -> None: ...

class DataReport(_message.Message):
    __slots__ = ("stream", "serial", "chunks", "want", "done", "holding", "returned")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    stream: str
    serial: int
    chunks: int
    want: int
    done: _containers.RepeatedScalarFieldContainer[int]
    holding: _containers.RepeatedScalarFieldContainer[int]
    returned: _containers.RepeatedCompositeFieldContainer[Lease]
    def __init__(self, stream: _Optional[str] = ..., serial: _Optional[int] = ..., chunks: _Optional[int] = ..., want: _Optional[int] = ..., done: _Optional[_Iterable[int]] = ..., holding: _Optional[_Iterable[int]] = ..., returned: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ...) -> None: ...

class SyncerMessage(_message.Message):
    __slots__ = ("welcome", "refused", "start", "upcoming", "request", "published", "fate", "reseed", "stop", "received", "heal", "donate", "inner_offer", "data_leases")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    UPCOMING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    FATE_FIELD_NUMBER: _ClassVar[int]
    RESEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    HEAL_FIELD_NUMBER: _ClassVar[int]
    DONATE_FIELD_NUMBER: _ClassVar[int]
    INNER_OFFER_FIELD_NUMBER: _ClassVar[int]
    DATA_LEASES_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refused: Refused
    start: Start
    upcoming: Upcoming
    request: Request
    published: Published
    fate: Fate
    reseed: Reseed
    stop: Stop
    received: Received
    heal: Heal
    donate: Donate
    inner_offer: InnerOffer
    data_leases: DataLeases
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., upcoming: _Optional[_Union[Upcoming, _Mapping]] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., fate: _Optional[_Union[Fate, _Mapping]] = ..., reseed: _Optional[_Union[Reseed, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., heal: _Optional[_Union[Heal, _Mapping]] = ..., donate: _Optional[_Union[Donate, _Mapping]] = ..., inner_offer: _Optional[_Union[InnerOffer, _Mapping]] = ..., data_leases: _Optional[_Union[DataLeases, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "epoch", "generation", "config_json", "fingerprint", "seed", "protocol", "rank_plus_one")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RANK_PLUS_ONE_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    generation: int
    config_json: str
    fingerprint: str
    seed: bool
    protocol: int
    rank_plus_one: int
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., generation: _Optional[int] = ..., config_json: _Optional[str] = ..., fingerprint: _Optional[str] = ..., seed: _Optional[bool] = ..., protocol: _Optional[int] = ..., rank_plus_one: _Optional[int] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("code", "detail")
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    code: str
    detail: str
    def __init__(self, code: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("step", "fragments", "due_steps")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    DUE_STEPS_FIELD_NUMBER: _ClassVar[int]
    step: int
    fragments: _containers.RepeatedCompositeFieldContainer[FragmentState]
    due_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, step: _Optional[int] = ..., fragments: _Optional[_Iterable[_Union[FragmentState, _Mapping]]] = ..., due_steps: _Optional[_Iterable[int]] = ...) -> None: ...

class FragmentState(_message.Message):
    __slots__ = ("version", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    checksum: int
    def __init__(self, version: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class Upcoming(_message.Message):
    __slots__ = ("fragments",)
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("round", "attempt", "fragment")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    round: int
    attempt: int
    fragment: int
    def __init__(self, round: _Optional[int] = ..., attempt: _Optional[int] = ..., fragment: _Optional[int] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("fragment", "version", "round", "checksum", "merged_seq", "contributors", "clock_step", "update", "due_step")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    MERGED_SEQ_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTORS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_STEP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    DUE_STEP_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    round: int
    checksum: int
    merged_seq: int
    contributors: int
    clock_step: int
    update: bytes
    due_step: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., checksum: _Optional[int] = ..., merged_seq: _Optional[int] = ..., contributors: _Optional[int] = ..., clock_step: _Optional[int] = ..., update: _Optional[bytes] = ..., due_step: _Optional[int] = ...) -> None: ...

class Fate(_message.Message):
    __slots__ = ("fragment", "seq", "version", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    seq: int
    version: int
    reason: str
    def __init__(self, fragment: _Optional[int] = ..., seq: _Optional[int] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Reseed(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("fragment", "seq", "reply")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    seq: int
    reply: PushReply
    def __init__(self, fragment: _Optional[int] = ..., seq: _Optional[int] = ..., reply: _Optional[_Union[PushReply, _Mapping]] = ...) -> None: ...

class Heal(_message.Message):
    __slots__ = ("fragments",)
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    fragments: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragments: _Optional[_Iterable[int]] = ...) -> None: ...

class Donate(_message.Message):
    __slots__ = ("slot", "bases")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    BASES_FIELD_NUMBER: _ClassVar[int]
    slot: int
    bases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., bases: _Optional[_Iterable[int]] = ...) -> None: ...

class InnerOffer(_message.Message):
    __slots__ = ("slot", "pieces", "size", "peer", "reason")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    slot: int
    pieces: int
    size: int
    peer: str
    reason: str
    def __init__(self, slot: _Optional[int] = ..., pieces: _Optional[int] = ..., size: _Optional[int] = ..., peer: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class DataLeases(_message.Message):
    __slots__ = ("stream", "serial", "granted", "revoked", "exhausted")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_FIELD_NUMBER: _ClassVar[int]
    stream: str
    serial: int
    granted: _containers.RepeatedCompositeFieldContainer[Lease]
    revoked: _containers.RepeatedScalarFieldContainer[int]
    exhausted: bool
    def __init__(self, stream: _Optional[str] = ..., serial: _Optional[int] = ..., granted: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., revoked: _Optional[_Iterable[int]] = ..., exhausted: _Optional[bool] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class AskToLeaveRequest(_message.Message):
    __slots__ = ("learner",)
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    learner: str
    def __init__(self, learner: _Optional[str] = ...) -> None: ...

class AskToLeaveReply(_message.Message):
    __slots__ = ("state", "refused")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    state: str
    refused: Refused
    def __init__(self, state: _Optional[str] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ...) -> None: ...

class PushPart(_message.Message):
    __slots__ = ("offset", "checksum", "open", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    checksum: int
    open: PushOpen
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., checksum: _Optional[int] = ..., open: _Optional[_Union[PushOpen, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PushOpen(_message.Message):
    __slots__ = ("header", "attempt_id", "stripes", "part_bytes")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STRIPES_FIELD_NUMBER: _ClassVar[int]
    PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    header: PushHeader
    attempt_id: int
    stripes: int
    part_bytes: int
    def __init__(self, header: _Optional[_Union[PushHeader, _Mapping]] = ..., attempt_id: _Optional[int] = ..., stripes: _Optional[int] = ..., part_bytes: _Optional[int] = ...) -> None: ...

class PushHeader(_message.Message):
    __slots__ = ("kind", "learner", "generation", "fragment", "round", "attempt", "seq", "base_version", "steps", "tokens", "codec", "size", "checksum")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    kind: PushKind
    learner: str
    generation: int
    fragment: int
    round: int
    attempt: int
    seq: int
    base_version: int
    steps: int
    tokens: int
    codec: str
    size: int
    checksum: int
    def __init__(self, kind: _Optional[_Union[PushKind, str]] = ..., learner: _Optional[str] = ..., generation: _Optional[int] = ..., fragment: _Optional[int] = ..., round: _Optional[int] = ..., attempt: _Optional[int] = ..., seq: _Optional[int] = ..., base_version: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., codec: _Optional[str] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...

class PushReply(_message.Message):
    __slots__ = ("accepted", "code", "detail", "late")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    code: str
    detail: str
    late: bool
    def __init__(self, accepted: _Optional[bool] = ..., code: _Optional[str] = ..., detail: _Optional[str] = ..., late: _Optional[bool] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("kind", "learner", "generation", "fragment", "version", "offset", "length")
    KIND_FIELD_NUMBER: _ClassVar[int]
    LEARNER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    kind: FetchKind
    learner: str
    generation: int
    fragment: int
    version: int
    offset: int
    length: int
    def __init__(self, kind: _Optional[_Union[FetchKind, str]] = ..., learner: _Optional[str] = ..., generation: _Optional[int] = ..., fragment: _Optional[int] = ..., version: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FetchPart(_message.Message):
    __slots__ = ("offset", "checksum", "header", "refused", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    checksum: int
    header: FetchHeader
    refused: Refused
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., checksum: _Optional[int] = ..., header: _Optional[_Union[FetchHeader, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class FetchHeader(_message.Message):
    __slots__ = ("version", "codec", "size", "checksum")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    version: int
    codec: str
    size: int
    checksum: int
    def __init__(self, version: _Optional[int] = ..., codec: _Optional[str] = ..., size: _Optional[int] = ..., checksum: _Optional[int] = ...) -> None: ...
