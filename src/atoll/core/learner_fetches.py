"""How published versions reach a learner: inside their notice, or fetched, one at a time on a thin link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.core.effects import Fetch, FetchBroken, Fetched, LearnerInput
from atoll.core.learner_host import FetchAnswer, FetchedPayload, LearnerDriverHost, Payload, PreparedVersion
from atoll.core.learner_machine import LearnerMachine
from atoll.core.learner_waits import FETCHES_MAX, RETRY_NS, SLOW_FETCH_NS, UPDATES_KEPT
from atoll.core.messages import NO_VERSION, FetchKind, FetchRequest, Published, Refusal
from atoll.core.values import replace

RATE_NS_MIN = 100_000_000
"""A fetch that takes less tells nothing of the link's rate, and the link is quick enough."""


@dataclass(slots=True)
class Arrival:
    """What has come over the link so far, and how fast."""

    count: int = 0
    bytes: int = 0
    rate: float = 0.0
    """Bytes/s of the last fetch that took long enough to tell; 0.0 before."""
    last_ns: int = 0
    """What the last fetch took."""

    def came(self, size: int, took_ns: int) -> None:
        self.count, self.last_ns = self.count + 1, took_ns
        self.bytes += size
        if size and took_ns >= RATE_NS_MIN:
            self.rate = size / (took_ns / 1e9)


class VersionFetches:
    """One at a time on a thin link: two that share it would both be late."""

    def __init__(
        self,
        machine: LearnerMachine,
        host: LearnerDriverHost,
        handle: Callable[[LearnerInput], None],
    ) -> None:
        self._machine = machine
        self._host = host
        self._handle = handle
        self._updates: dict[tuple[int, int], Payload] = {}
        """Small updates that came inside their Published notice and are not prepared yet."""
        self._waiting: deque[Fetch] = deque()
        self._running = 0
        self.arriving = Arrival()

    # ------------------------------------------------------------ small updates

    def keep_update(self, notice: Published) -> None:
        """A learner that stands still keeps a few; it fetches what it missed when it goes on."""
        if not len(notice.update):
            return
        if sum(fragment == notice.fragment for fragment, _ in self._updates) < UPDATES_KEPT:
            self._updates[notice.fragment, notice.version] = notice.update

    def adopted(self, fragment: int, version: int) -> None:
        for key in [k for k in self._updates if k[0] == fragment and k[1] <= version]:
            del self._updates[key]

    def link_down(self) -> None:
        self._updates.clear()
        self._waiting.clear()

    # ------------------------------------------------------------ one fetch

    def begin(self, wanted: Fetch) -> None:
        began_ns = self._host.now_ns()
        update = self._updates.pop((wanted.fragment, wanted.version), None)
        if update is not None:
            wanted = replace(wanted, kind=FetchKind.UPDATE)
            self._host.prepare_update(wanted, update, partial(self._prepared, wanted, len(update), began_ns))
        else:
            self._waiting.append(wanted)
            self._fetch_more()

    def _fetch_more(self) -> None:
        """One after the other, each comes as soon as it can; on a thin link all others wait for it either way."""
        thin = not self._machine.joined or self.arriving.last_ns > SLOW_FETCH_NS
        while self._waiting and self._running < (1 if thin else FETCHES_MAX):
            wanted = self._waiting.popleft()
            self._running += 1
            if wanted.kind is FetchKind.THETA and wanted.version == 0:
                # If the run's first parameters are the ones with which this learner came there is nothing to fetch.
                self._host.find_own(wanted, partial(self._fetch_unless, wanted))
            else:
                self._fetch(wanted)

    def _fetch_unless(self, wanted: Fetch, own: FetchedPayload | None) -> None:
        if own is None:
            self._fetch(wanted)
        else:
            self._fetched(wanted, self._host.now_ns(), own)

    def _fetch(self, wanted: Fetch) -> None:
        version = NO_VERSION if wanted.kind is FetchKind.THETA else wanted.version
        machine = self._machine
        who = (machine.learner, machine.generation)
        request = FetchRequest(wanted.kind, *who, wanted.fragment, version, secret=machine.secret)
        self._host.fetch(request, partial(self._fetched, wanted, self._host.now_ns()))

    def _fetched(self, wanted: Fetch, began_ns: int, answer: FetchAnswer) -> None:
        self._running -= 1
        if isinstance(answer, FetchedPayload):
            took_ns = self._host.now_ns() - began_ns
            self.arriving.came(answer.size, took_ns)
            self._host.moved_down(answer.size, took_ns)
            done = partial(self._prepared, wanted, answer.size, began_ns)
            if answer.payload is None:
                done("what came was damaged")
            elif wanted.kind is FetchKind.THETA:
                self._host.prepare_whole(wanted.fragment, answer, done)
            else:
                self._host.prepare_update(wanted, answer.payload, done)
        else:
            gone = answer == Refusal.UNKNOWN_VERSION
            broken = FetchBroken(wanted.fragment, wanted.version, gone)
            self._host.later(0 if gone else RETRY_NS, self._broken, broken)
        self._fetch_more()

    def _prepared(self, wanted: Fetch, size: int, began_ns: int, made: PreparedVersion | str) -> None:
        fragment = wanted.fragment
        if isinstance(made, str):
            self._host.warn(f"{made}; fetching the fragment whole")
            self._broken(FetchBroken(fragment, wanted.version, gone=True))
            return
        self._host.came(wanted, made.version, size, self._host.now_ns() - began_ns)
        if wanted.kind is FetchKind.THETA and made.version < wanted.version:
            # Whoever serves it has lost what was announced. Asking at once would go round as fast as the link lets it.
            self._host.later(RETRY_NS, self._take, wanted, made)
        else:
            self._take(wanted, made)

    def _take(self, wanted: Fetch, made: PreparedVersion) -> None:
        self._handle(Fetched(wanted.fragment, made.version, wanted.version, made.checksum))
        if self._machine.will_adopt(wanted.fragment, made.version):
            self._host.arrays.keep(wanted.fragment, made)
        self._host.news()

    def _broken(self, event: FetchBroken) -> None:
        self._handle(event)
        self._host.news()
