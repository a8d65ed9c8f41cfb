"""Commands: what the rank that speaks asks of all ranks of its learner, itself included, done by each in one order.

A command's head has fixed size and says everything; bytes follow where its numbers say so. Every command that can fail
ends with a report of each rank to the speaker, so that `done` there means done everywhere.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from threading import Condition
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.codec import block_bytes
from atoll.core import FetchKind, OutgoingPayload, PushReply, SyncConfig, build_layout
from atoll.core import effects as fx
from atoll.errors import IslandError, PayloadError
from atoll.learner.island.arrays import RankArrays
from atoll.learner.island.carrier import Carrier, Route
from atoll.learner.island.freight import HELD, SEED, Freight, NotFetchedError
from atoll.learner.island.given_state import GivenState
from atoll.learner.island.link import COMMAND_WORDS, SPEAKER, RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.parts import WHOLE
from atoll.learner.island.word import RULES
from atoll.learner.parameters import F32
from atoll.learner.vault import HeldVersion
from atoll.wire import ClientOptions

U8 = NDArray[np.uint8]
I64 = NDArray[np.int64]
CHECK_EVERY = 16
"""Versions of a fragment of which one is compared with the syncer's, byte for byte: what they are added up from was
checked when it came."""


class Op(enum.IntEnum):
    NOTHING = 0
    STOP = 1
    LAY_OUT = 2
    CONTRIBUTE = 3
    UPDATE = 4
    WHOLE = 5
    STAGE = 6
    SETTLE = 7
    DROP = 8
    DISCARD = 9
    FORGET_RESIDUALS = 10
    FORGET_PREPARED = 11
    READ_SEED = 12
    READ_HELD = 13
    ROUTE = 14
    PUSH = 15
    GATHER = 16
    UNLOAD = 17
    FETCH = 18
    CHECK_SEED = 19
    COUNT = 20
    LOOK = 21
    PACK_INNER = 22
    INNER_PIECE = 23
    FORGET_INNER = 24


class Outcome(enum.IntEnum):
    FINE = 0
    REFUSED = 1
    """The bytes are none, or are not finite."""
    NOT_HERE = 2
    OUT_OF_REACH = 3
    NOT_FETCHED = 4
    NOT_PUSHED = 5


class Source(enum.IntEnum):
    """Where the bytes of a version are."""

    SPEAKER = 0
    FETCHED = 1
    """Each rank has fetched parts of them."""
    OWN = 2
    """They are those with which this learner came."""


@dataclass(frozen=True, slots=True)
class RankCommand:
    op: Op
    numbers: tuple[int, ...] = ()

    def head(self, boundary: int) -> I64:
        """`boundary`: how many of them the speaker had behind it."""
        head = np.zeros(COMMAND_WORDS, np.int64)
        values = (self.op, boundary, len(self.numbers), *self.numbers)
        if len(values) > COMMAND_WORDS:
            raise IslandError(f"a command of {len(values)} numbers is too long; that is a defect in atoll")
        head[: len(values)] = values
        return head


def read_head(head: I64) -> tuple[RankCommand, int]:
    op, boundary, count = (int(value) for value in head[:3])
    return RankCommand(Op(op), tuple(int(value) for value in head[3 : 3 + count])), boundary


def stage_command(effect: fx.Adopt) -> RankCommand:
    alpha = int(np.float64(effect.alpha).view(np.int64))
    numbers = (effect.fragment, effect.version, RULES.index(effect.rule), alpha, *effect.already_merged)
    return RankCommand(Op.STAGE, numbers)


def contribute_command(effect: fx.Contribute, boundary: int) -> RankCommand:
    """Of the copy that was taken at this boundary, as the codec that the header names."""
    header, codec = effect.header, text_numbers(effect.header.codec)
    numbers = (header.fragment, header.seq, boundary, int(effect.feedback), len(codec), *codec)
    return RankCommand(Op.CONTRIBUTE, (*numbers, *effect.already_merged))


def text_numbers(text: str) -> tuple[int, ...]:
    """A short text as a command carries it: eight bytes in a number."""
    raw = text.encode()
    return tuple(np.frombuffer(raw.ljust(-(-len(raw) // 8) * 8, b"\0"), np.int64).tolist())


def read_text(numbers: tuple[int, ...]) -> str:
    return np.array(numbers, np.int64).tobytes().rstrip(b"\0").decode()


class _NotHereError(Exception):
    """A version that this rank does not hold any more."""


class RankWork:
    """One rank's part in commands. Its worker thread calls `run`."""

    def __init__(self, parameters: RankParameters, link: RankLink, lock: Condition, options: ClientOptions) -> None:
        self._parameters = parameters
        self._link = link
        self.carrier = Carrier(options)
        self._freight = Freight(parameters, link, self.carrier)
        self._lock = lock
        self._speaks = link.rank == SPEAKER
        self.arrays: RankArrays | None = None
        self.inner = GivenState(link)

    def run(self, command: RankCommand, payload: Any = None) -> Any:
        """Do this rank's part. At the speaker: the result, or a text where it failed."""
        return getattr(self, f"_{command.op.name.lower()}")(payload, *command.numbers)

    @property
    def _here(self) -> RankArrays:
        assert self.arrays is not None, "a command came before the layout"
        return self.arrays

    # ------------------------------------------------------------ small ones

    def _nothing(self, payload: None) -> None:
        return

    def _settle(self, payload: None, fragment: int, seq: int, merged: int) -> None:
        self._here.settle(fragment, seq, bool(merged))
        self._freight.unload((fragment, seq))

    def _drop(self, payload: None, fragment: int, boundary: int) -> None:
        self._here.drop(fragment, boundary)

    def _discard(self, payload: None, fragment: int, version: int) -> None:
        self._here.discard(fragment, version)

    def _forget_residuals(self, payload: None) -> None:
        self._here.forget_residuals()

    def _forget_prepared(self, payload: None, fragment: int) -> None:
        self._here.forget_prepared(fragment)

    def _unload(self, payload: None, fragment: int, seq: int) -> None:
        self._freight.unload((fragment, seq))

    def _count(self, payload: None) -> list[int]:
        """Payload bytes that each rank has sent, then those that each has received."""
        counts = np.zeros(2 * self._link.size, np.int64)
        counts[self._link.rank] = self.carrier.bytes_up
        counts[self._link.size + self._link.rank] = self.carrier.bytes_down
        self._link.add_up(counts)
        return [int(count) for count in counts]

    # ------------------------------------------------------------ inner state, for a joiner

    def copy_inner(self) -> None:
        """Training thread, at a boundary."""
        self.inner.copy()

    def _pack_inner(self, payload: None) -> list[int] | str:
        """How many bytes each rank's part of the state has."""
        code, _ = self._try(self.inner.pack)
        failed = self._report(code)
        return failed if failed is not None else self.inner.sizes()

    def _inner_piece(self, payload: None, start: int, stop: int) -> U8 | None:
        return self.inner.piece(start, stop)

    def _forget_inner(self, payload: None) -> None:
        self.inner.forget()

    # ------------------------------------------------------------ layout and routes

    def _told(self, text: bytes | None, size: int) -> bytes:
        """What the speaker says, at all ranks."""
        data = np.frombuffer(text, np.uint8).copy() if text is not None else np.empty(size, np.uint8)
        if self._speaks:
            self._link.exchange({rank: data for rank in range(self._link.size) if rank != SPEAKER}, {})
        else:
            self._link.exchange({}, {SPEAKER: data})
        return data.tobytes()

    def _lay_out(self, payload: bytes | None, size: int) -> str | None:
        """The run's settings, from which every rank makes the same layout."""
        settings = SyncConfig(**json.loads(self._told(payload, size)))

        def lay_out() -> None:
            if self.arrays is None:
                layout = build_layout(self._parameters.specs, settings.fragments)
                self.arrays = RankArrays(self._parameters, layout, settings, self._lock)
            self.arrays.vault.config = settings

        return self._report(self._try(lay_out)[0])

    def _route(self, payload: bytes | None, size: int) -> str | None:
        """Where fragments are served, and under which secret. None: every rank can reach it."""
        told = json.loads(self._told(payload, size))
        route = Route(**{**told, "shards": tuple(told["shards"]), "shard_of": tuple(told["shard_of"])})
        code, reached = self._try(lambda: self.carrier.route(route))
        return self._report(Outcome.OUT_OF_REACH if code is Outcome.FINE and not reached else code)

    # ------------------------------------------------------------ contributions

    def _contribute(
        self, payload: None, fragment: int, seq: int, boundary: int, feedback: int, letters: int, *more: int
    ) -> OutgoingPayload | str:
        here = self._here
        codec, merged = read_text(more[:letters]), more[letters:]
        code, part = self._try(lambda: here.contribute(fragment, seq, boundary, codec, merged, bool(feedback)))
        failed = self._report(code)
        if failed is not None:
            return failed
        return self._freight.load((fragment, seq), fragment, block_bytes(codec), part)

    def _push(self, payload: bytes | None, size: int, fragment: int, seq: int, of: int) -> Future[PushReply] | None:
        """Begin to push the parts of a payload that is ready."""
        return self._freight.push((fragment, seq), of, self._told(payload, size))

    def _look(self, payload: None, fragment: int, seq: int) -> str | None:
        """Whether a rank could not push its parts: the syncer would wait for them."""
        return self._report(Outcome.NOT_PUSHED if self._freight.stuck((fragment, seq)) else Outcome.FINE)

    def _gather(self, payload: None, fragment: int, seq: int) -> U8 | None:
        return self._freight.gather((fragment, seq))

    # ------------------------------------------------------------ versions

    def _fetch(self, payload: None, fragment: int, version: int, whole: int) -> Future[U8]:
        """Begin to fetch parts of it."""
        kind = FetchKind.THETA if whole else FetchKind.UPDATE
        return self._freight.fetch(kind, fragment, version, self._sections(whole))

    def _sections(self, whole: int) -> tuple[int, ...]:
        return WHOLE if whole else block_bytes(self._here.vault.config.codec_down)

    def _came(self, payload: U8 | None, fragment: int, version: int, whole: int, source: int) -> U8 | str:
        """This rank's blocks of what came, from wherever it is."""
        if source == Source.OWN:
            return self._here.seed_values(fragment).view(np.uint8)
        if source == Source.SPEAKER:
            return self._freight.shared_out(fragment, self._sections(whole), payload)
        code, carried = self._try(lambda: self._freight.fetched(fragment, version))
        failed = self._report(code)
        return failed if failed is not None else self._freight.unpacked(fragment, self._sections(whole), carried)

    def _update(self, payload: U8 | None, fragment: int, version: int, checksum: int, source: int) -> HeldVersion | str:
        part = self._came(payload, fragment, version, 0, source)
        if isinstance(part, str):
            return part
        code, made = self._try(lambda: self._here.prepare_update(fragment, version, part))
        failed = self._report(code)
        if failed is None and version % CHECK_EVERY == 0:
            failed = self._compare(fragment, made, _unsigned(checksum))
        return self._made(made, failed, checksum)

    def _whole(self, payload: U8 | None, fragment: int, version: int, checksum: int, source: int) -> HeldVersion | str:
        part = self._came(payload, fragment, version, 1, source)
        if isinstance(part, str):
            return part
        code, made = self._try(lambda: self._here.prepare_whole(fragment, version, part))
        failed = self._report(code)
        if failed is None and source == Source.FETCHED:
            failed = self._compare(fragment, made, _unsigned(checksum))
        return self._made(made, failed, checksum)

    def _made(self, made: Any, failed: str | None, checksum: int) -> HeldVersion | str:
        if failed is not None:
            return failed
        made.checksum = _unsigned(checksum)
        return made  # type: ignore[no-any-return]

    def _compare(self, fragment: int, made: Any, expected: int) -> str | None:
        digest = self._freight.digest(fragment, WHOLE, made.theta.view(np.uint8))
        if not self._speaks or not expected or digest == expected:
            return None
        return f"version {made.version} of fragment {fragment} differs from the syncer's"

    def _stage(self, payload: None, fragment: int, version: int, rule: int, alpha: int, *merged: int) -> str | None:
        effect = fx.Adopt(fragment, version, RULES[rule], float(np.int64(alpha).view(np.float64)), merged)
        return self._report(self._try(lambda: self._here.stage(effect))[0])

    # ------------------------------------------------------------ parameters as they are

    def _read_seed(self, payload: None, fragment: int) -> OutgoingPayload | str:
        return self._read(SEED, fragment, lambda: self._here.seed_values(fragment))

    def _read_held(self, payload: None, fragment: int, version: int) -> OutgoingPayload | str:
        def held() -> F32:
            values = self._here.held_values(fragment, version)
            if values is None:
                raise _NotHereError
            return values

        return self._read(HELD, fragment, held)

    def _read(self, what: int, fragment: int, values: Callable[[], F32]) -> OutgoingPayload | str:
        """All ranks have the values in parts, until the next ones are read."""
        code, mine = self._try(values)
        failed = self._report(code)
        if failed is not None:
            return failed
        return self._freight.load((what, what), fragment, WHOLE, np.ascontiguousarray(mine).view(np.uint8))

    def _check_seed(self, payload: None, fragment: int) -> int | str:
        """The checksum of the parameters with which this learner came."""
        code, mine = self._try(lambda: self._here.seed_values(fragment))
        failed = self._report(code)
        return failed if failed is not None else self._freight.digest(fragment, WHOLE, mine.view(np.uint8))

    # ------------------------------------------------------------ what commands have in common

    def _try(self, work: Callable[[], Any]) -> tuple[Outcome, Any]:
        """What may fail on one rank at a place that all of them come to. A defect may be anywhere, and others may wait
        for this rank's arrays by then: it ends this thread, and the training thread tells them."""
        try:
            return Outcome.FINE, work()
        except PayloadError as error:
            return Outcome.REFUSED, str(error)
        except _NotHereError:
            return Outcome.NOT_HERE, None
        except NotFetchedError:
            return Outcome.NOT_FETCHED, None

    def _report(self, code: Outcome) -> str | None:
        """What is wrong, on any rank; None if nothing is. The same at all ranks."""
        codes = np.zeros(self._link.size, np.int64)
        codes[self._link.rank] = code
        self._link.add_up(codes)
        bad = [f"rank {rank}: {_TEXTS[Outcome(int(one))]}" for rank, one in enumerate(codes) if one]
        return "; ".join(bad) or None


def config_bytes(config: SyncConfig) -> bytes:
    return json.dumps(asdict(config)).encode()


def signed(number: int) -> int:
    """A 64-bit checksum as a command carries it."""
    return int(np.uint64(number).view(np.int64))


def _unsigned(number: int) -> int:
    return int(np.int64(number).view(np.uint64))


_TEXTS = {
    Outcome.REFUSED: "its values are not finite, or the bytes do not fit",
    Outcome.NOT_HERE: "it is not there any more",
    Outcome.OUT_OF_REACH: "it cannot reach the syncer by itself",
    Outcome.NOT_FETCHED: "it could not fetch its parts",
    Outcome.NOT_PUSHED: "it could not push its parts",
}
