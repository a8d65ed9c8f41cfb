"""A learner under examination: everything that it says is looked at as it comes, whatever scene is being played.

`LearnerExam` is the audience of a `PlayedSyncer`. It holds a learner's words against the run that is played for it,
answers what every syncer answers, and lets a scene say how the next contribution or fetch is to be answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import xxhash
from google.protobuf.message import DecodeError

from atoll.codec import get_codec
from atoll.core import SyncConfig, TensorSpec, tensors_fingerprint
from atoll.errors import PayloadError
from atoll.instruments.conform.played_run import PlayedRun, TakenPush
from atoll.instruments.conform.played_syncer import PlayedSession
from atoll.instruments.conform.push_intake import PushIntake
from atoll.instruments.conform.report import Report
from atoll.wire import raw

pb = raw.pb

LOOK_S = 0.02
"""Between two looks at whether something has happened."""
HEARD_MAX = 100_000
"""Messages of one learner that are kept: a step of a millisecond reports for a minute and a half."""
PART_BYTES = 2**20
"""Of a fetch: its parts end at multiples of this."""
UNANSWERED = "unanswered"
"""How a contribution is answered whose link breaks first."""


class Gone(Exception):
    """The learner did not do in time what the scene needs to go on."""


class LearnerExam:
    def __init__(self, report: Report, config: SyncConfig, *, token: str = "", patience_s: float = 30.0) -> None:
        self.report, self.patience_s = report, patience_s
        self.run = PlayedRun(config)
        self.token = token
        self.sessions: list[PlayedSession] = []
        self.hellos: list[Any] = []
        self.unusable = 0
        """First messages that could not be read."""
        self.heard: deque[Any] = deque(maxlen=HEARD_MAX)
        """Control messages but Hello, in order."""
        self.progress: Any = None
        """The last report."""
        self.ready: Any = None
        self.started = False
        self.left = False
        self.pushes: list[Any] = []
        """Headers of whole fragments that came: seeds and heals."""
        self.fetches: list[Any] = []
        self.answers: deque[str] = deque()
        """How the next contributions are answered: a refusal's code, or UNANSWERED. Those after them are accepted."""
        self.seed_answers: deque[str] = deque()
        self.fetches_to_damage = 0
        self._saying: deque[asyncio.Future[None]] = deque(maxlen=1000)
        """The loop itself keeps only weak references to what is being sent."""
        self.alive: Callable[[], bool] = lambda: True
        self._reported: list[int] = []
        self._intake = PushIntake(report, self._pushed)

    # ------------------------------------------------------------ waiting

    async def until(
        self, happened: Callable[[], object], clause: str = "", what: str = "", patience_s: float = 0.0
    ) -> None:
        """Wait until something has happened. If it does not in time the clause is broken and the scene cannot go on."""
        patience_s = max(patience_s, self.patience_s)
        deadline_s = time.monotonic() + patience_s
        while not happened():
            late = time.monotonic() > deadline_s
            if late or not self.alive():
                why = f"within {patience_s:g} s" if late else "before the learner's process ended"
                if clause:
                    self.report.broken(clause, f"{what} was not seen {why}")
                raise Gone(what)
            await asyncio.sleep(LOOK_S)
        if clause:
            self.report.kept(clause)

    async def quiet(self, happened: Callable[[], object], seconds: float) -> bool:
        """Whether something did not happen for so long."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s and self.alive():
            if happened():
                return False
            await asyncio.sleep(LOOK_S)
        return not happened()

    @property
    def session(self) -> PlayedSession:
        return self.sessions[-1]

    # ------------------------------------------------------------ control

    def session_heard(self, session: PlayedSession, data: bytes) -> None:
        message = self._parse(data)
        if message is None:
            self.unusable += session.messages == 1
            session.end()
            return
        kind = message.WhichOneof("message")
        if session.messages == 1:
            self._first(session, kind, message)
            return
        self.report.check("hello.first", kind != "hello", "a second Hello in one session")
        getattr(self, f"_{kind}", self._other)(getattr(message, kind), session)
        self.heard.append(message)

    def _parse(self, data: bytes) -> Any:
        try:
            body = raw.unseal(data)
            self.report.kept("seal.right")
        except PayloadError:
            self.report.broken("seal.right", f"a message of {len(data)} bytes has the seal of other bytes")
            return None
        try:
            message = pb.LearnerMessage.FromString(body)
        except DecodeError:
            message = None
        known = message is not None and message.WhichOneof("message") is not None
        self.report.check("message.valid", known, f"{len(body)} bytes that are no LearnerMessage")
        return message if known else None

    def _first(self, session: PlayedSession, kind: str, message: Any) -> None:
        if self.token:
            self._check_token(session.metadata)
        if self.report.check("hello.first", kind == "hello", f"a session begins with {kind}"):
            self._check_hello(message.hello)
            self.hellos.append(message.hello)
            self.sessions.append(session)

    def _check_token(self, metadata: dict[str, str]) -> None:
        self.report.check("call.token", metadata.get(raw.TOKEN_KEY) == self.token, "a call without the token")

    def _check_hello(self, hello: Any) -> None:
        named = 1 <= len(hello.learner) <= 64 and hello.learner.isascii() and hello.learner.isprintable()
        self.report.check("message.valid", named, f"the learner's id is {hello.learner!r}")
        self.report.check("message.valid", hello.instance, "Hello.instance is empty")
        self.report.check("message.valid", hello.protocol >= 1, f"Hello.protocol is {hello.protocol}")
        if hello.tensors and hello.fingerprint:
            own = tensors_fingerprint(tensors_of(hello))
            self.report.check("hello.fingerprint", own == hello.fingerprint, f"{hello.fingerprint}, it should be {own}")

    def session_over(self, session: PlayedSession) -> None:
        session.over = True

    def _ready(self, message: Any, _session: PlayedSession) -> None:
        self.report.check("start.first", self.started, "Ready before Start")
        self.ready = message
        self._check_bases(list(message.bases))

    def _progress(self, message: Any, _session: PlayedSession) -> None:
        last = self.progress
        if last is None:
            self.report.check("start.first", self.ready is not None, "Progress before the first Ready")
        if last is not None:
            grew = message.steps >= last.steps and message.tokens >= last.tokens
            self.report.check(
                "progress.counts",
                grew and message.step - last.step == message.steps - last.steps,
                f"step {last.step} -> {message.step}, steps {last.steps} -> {message.steps}, tokens {last.tokens} -> "
                f"{message.tokens}",
            )
        self.progress = message
        self._check_bases(list(message.bases))
        self._check_pending(message)

    def _check_bases(self, bases: list[int]) -> None:
        known = len(bases) == self.run.fragments and all(
            0 <= base <= newest for base, newest in zip(bases, self.run.versions, strict=True)
        )
        forward = not self._reported or all(map(int.__le__, self._reported, bases))
        self.report.check(
            "progress.bases",
            known and forward,
            f"bases {bases}, after {self._reported}; published are {self.run.versions}",
        )
        if known:
            self._reported = bases

    def _check_pending(self, message: Any) -> None:
        """The learner may not have heard yet of what was published last."""
        if not message.pending or len(message.bases) != self.run.fragments:
            return
        for fragment, pending in enumerate(message.pending):
            discarded = sum(count.tokens for count in message.discarded if count.fragment == fragment)
            rest = message.tokens - pending - discarded
            low, high = (
                self.run.merged_tokens(fragment, version)
                for version in (message.bases[fragment], self.run.versions[fragment])
            )
            self.report.check(
                "progress.pending",
                low <= rest <= high,
                f"fragment {fragment}: {message.tokens} tokens, {pending} pending, {discarded} discarded, and {low} to "
                f"{high} were merged",
            )

    def _leave(self, _message: Any, _session: PlayedSession) -> None:
        self.left = True

    def _contribution(self, message: Any, session: PlayedSession) -> None:
        header, payload = message.header, bytes(message.payload)
        self._intake.check_payload(header, payload)
        small = len(payload) <= 65_536
        self.report.check("message.valid", small, f"a Contribution of {len(payload)} bytes; use Bulk above 64 KiB")
        code = self._contributed(header, payload, inline=True)
        if code != UNANSWERED:
            answer = pb.Received(fragment=header.fragment, seq=header.seq, reply=reply_of(code))
            self._saying.append(asyncio.ensure_future(self._say(session, received=answer)))

    async def _say(self, session: PlayedSession, **message: Any) -> None:
        with contextlib.suppress(Exception):  # a stream that is over is seen elsewhere
            await session.say(**message)

    def _other(self, _message: Any, _session: PlayedSession) -> None:
        """Nothing, and a DataReport: answers that need no look of their own."""

    # ------------------------------------------------------------ contributions

    def _contributed(self, header: Any, payload: bytes, *, inline: bool) -> str:
        """Look at one, and say how it is answered: accepted, a code, or UNANSWERED."""
        self._check_names(header, secret_needed=not inline)
        fragment, config = int(header.fragment), self.run.config
        if not 0 <= fragment < self.run.fragments:
            self.report.broken("contribution.header", f"fragment {fragment} of {self.run.fragments}")
            return "unknown_fragment"
        self.report.check(
            "contribution.header",
            header.codec == config.codec_up and header.steps >= 1 and header.tokens >= 1,
            f"codec {header.codec!r}, {header.steps} steps, {header.tokens} tokens",
        )
        low = self._reported[fragment] if self._reported else 0
        self.report.check(
            "contribution.base",
            low <= header.base_version <= self.run.versions[fragment],
            f"fragment {fragment}: base {header.base_version}, its learner has said {low}, published is "
            f"{self.run.versions[fragment]}",
        )
        self._check_values(fragment, payload)
        return self._number(TakenPush(header, payload))

    def _check_values(self, fragment: int, payload: bytes) -> None:
        values = np.zeros(self.run.size(fragment), np.float32)
        try:
            get_codec(self.run.config.codec_up).decode_add(payload, values)
            right, seen = bool(np.isfinite(values).all()), "values that are not finite"
        except PayloadError as error:
            right, seen = False, str(error)
        self.report.check("contribution.payload", right, f"fragment {fragment}: {seen}")

    def _number(self, taken: TakenPush) -> str:
        """Was this number used before, and for what?"""
        earlier = self.run.taken.get(taken.key)
        newest = max((seq for fragment, seq in self.run.taken if fragment == taken.key[0]), default=-1)
        same = earlier is None or earlier.payload == taken.payload
        self.report.check(
            "contribution.seq",
            same and (earlier is not None or taken.key[1] > newest),
            f"fragment {taken.key[0]}: number {taken.key[1]} after {newest}" if same else "a number for other bytes",
        )
        if earlier is not None and earlier.verdict == "accepted":
            return "duplicate"
        if earlier is not None and earlier.verdict not in ("busy", UNANSWERED):
            self.report.broken(
                "refused.final",
                f"fragment {taken.key[0]}: number {taken.key[1]} came again after {earlier.verdict}",
            )
            return earlier.verdict
        taken.verdict = self.answers.popleft() if self.answers else "accepted"
        self.run.taken[taken.key] = taken
        return taken.verdict

    # ------------------------------------------------------------ bulk

    async def push(self, parts: AsyncIterator[bytes], metadata: dict[str, str]) -> Any:
        if self.token:
            self._check_token(metadata)
        return await self._intake.receive(parts)

    async def _pushed(self, header: Any, payload: bytes) -> Any:
        if header.kind == pb.PUSH_CONTRIBUTION:
            code = self._contributed(header, payload, inline=False)
            if code == UNANSWERED:
                await self.until(lambda: self.session.over)
                return reply_of("busy")
            return reply_of(code)
        self._check_names(header, secret_needed=True)
        if header.kind == pb.PUSH_SEED:
            code = self.seed_answers.popleft() if self.seed_answers else "accepted"
            self._check_seed(header, payload)
            if code == "accepted" and 0 <= header.fragment < self.run.fragments and not self.started:
                self.run.seed(header.fragment, payload)
        else:
            code = "accepted"
            self._check_heal(header, payload)
        self.pushes.append(header)
        return reply_of(code)

    def _check_names(self, header: Any, *, secret_needed: bool) -> None:
        own = self.hellos[-1].learner if self.hellos else ""
        names = header.learner == own and header.generation == self.run.generation
        self.report.check(
            "push.names", names, f"{header.learner!r} of generation {header.generation}; it is {own!r} of generation "
            f"{self.run.generation}"
        )  # fmt: skip
        if secret_needed and self.run.secret:
            self.report.check("push.names", header.secret == self.run.secret, "not with the secret of the session")

    def _check_seed(self, header: Any, payload: bytes) -> None:
        if not 0 <= header.fragment < self.run.fragments:
            self.report.broken("seed.whole", f"fragment {header.fragment} of {self.run.fragments}")
            return
        size = 4 * self.run.size(header.fragment)
        right = len(payload) == size and header.codec == "fp32" and header.base_version == -1
        if self.report.check(
            "seed.whole",
            right,
            f"{len(payload)} bytes as {header.codec!r} with base {header.base_version}; {size} as 'fp32' with base -1 "
            "were due",
        ):
            padding = self._padding(header.fragment, np.frombuffer(payload, np.float32))
            self.report.check("seed.whole", not padding.any(), "the padding between tensors is not zero")

    def _padding(self, fragment: int, values: Any) -> Any:
        assert self.run.layout is not None
        free = np.ones(values.size, bool)
        for piece in self.run.layout.fragments[fragment].slices:
            free[piece.offset : piece.offset + piece.size] = False
        return values[free]

    def _check_heal(self, header: Any, payload: bytes) -> None:
        fragment = int(header.fragment)
        known = 0 <= fragment < self.run.fragments and header.kind == pb.PUSH_HEAL
        right = known and payload == self.run.theta[fragment].tobytes()
        self.report.check(
            "heal.bytes",
            right and header.base_version == self.run.versions[fragment],
            f"fragment {fragment}: version {header.base_version} is not what was published, to the bit",
        )

    async def fetch(self, request: bytes, metadata: dict[str, str]) -> AsyncIterator[bytes]:
        if self.token:
            self._check_token(metadata)
        try:
            wanted = pb.FetchRequest.FromString(raw.unseal(request))
        except (PayloadError, DecodeError):
            self.report.broken("message.valid", "bytes that are no FetchRequest")
            return
        self._check_names(wanted, secret_needed=True)
        self.fetches.append(wanted)
        content, version, codec = self._content(wanted)
        if content is None:
            refused = pb.Refused(code="unknown_version", detail="it is not here; fetch what was published")
            yield pb.FetchPart(refused=refused).SerializeToString()
            return
        damaged, self.fetches_to_damage = self.fetches_to_damage > 0, max(0, self.fetches_to_damage - 1)
        checksum = xxhash.xxh3_64_intdigest(content)
        header = pb.FetchHeader(version=version, codec=codec, size=len(content), checksum=checksum)
        for part in cut_into_parts(content, header, wanted.offset, wanted.length):
            if damaged:
                part.checksum ^= 1
            yield part.SerializeToString()

    def _content(self, wanted: Any) -> tuple[bytes | None, int, str]:
        fragment = int(wanted.fragment)
        if not 0 <= fragment < self.run.fragments:
            return None, 0, ""
        newest = self.run.versions[fragment]
        if wanted.kind == pb.FETCH_THETA and wanted.version in (-1, newest):
            return self.run.theta[fragment].tobytes(), newest, "fp32"
        update = self.run.updates.get((fragment, int(wanted.version))) if wanted.kind == pb.FETCH_UPDATE else None
        return update, int(wanted.version), self.run.config.codec_down


def tensors_of(hello: Any) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(t.name, tuple(t.shape), t.dtype, t.merge) for t in hello.tensors)


def reply_of(code: str) -> Any:
    if code == "accepted":
        return pb.PushReply(accepted=True)
    return pb.PushReply(accepted=False, code=code, detail="the conformance kit says so; see docs/reference/wire.md")


def cut_into_parts(content: bytes, header: Any, offset: int, length: int) -> list[Any]:
    """The parts of one fetch, each with its checksum."""
    stop = min(len(content), offset + length) if length else len(content)
    parts, opening = [], header
    while offset < stop or opening is not None:
        end = min(stop, (offset // PART_BYTES + 1) * PART_BYTES)
        encoded = opening.SerializeToString() if opening is not None else b""
        data = content[offset:end]
        part = pb.FetchPart(offset=offset, data=data, checksum=xxhash.xxh3_64_intdigest(encoded + data))
        if opening is not None:
            part.header.CopyFrom(opening)
        parts.append(part)
        offset, opening = end, None
    return parts
