"""A run that is only known by its syncer's address: what successive statuses say, as events.

All viewers share one question to the syncer every ASK_S, and there is none while nobody looks. Between two answers a
learner whose count of tokens grew has trained, for as long as its steps take by its own word; of the rest nothing is
claimed. A syncer has no loss of the published model: learners evaluate it, and write that down where they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from atoll.dash import bytes_text
from atoll.errors import AtollError
from atoll.observe import Event, events
from atoll.wire import ClientOptions, fetch_status

ASK_S = 2.0
"""As often as `atoll status --watch` looks."""
PLACES_S = 10.0
"""Learners do not move often."""
SOURCE = "status"
PARTS_MAX = 200
"""Shards, relays and a standby that are listed."""
NAMES_MAX = 12

Stamped = tuple[int, str, Event]


class StatusFeed:
    """Implements `watching.RunFeed`."""

    def __init__(self, options: ClientOptions, ask: Callable[[ClientOptions], dict[str, Any]] | None = None) -> None:
        self._options = options
        self._ask = ask or ask_status
        self._asked_s = -math.inf
        self._before: tuple[int, dict[str, Any]] | None = None
        self._places: dict[str, str] = {}
        self._parts: list[list[str]] = []
        self._warned_s = 0.0
        self.trouble = ""

    def poll(self) -> Iterator[Stamped]:
        if time.monotonic() - self._asked_s < ASK_S:
            return
        self._asked_s = time.monotonic()
        try:
            answer = self._ask(self._options)
        except AtollError as error:
            self.trouble = str(error)
            return
        self.trouble = ""
        now_ns = time.time_ns()
        self._places, self._parts = places_in(answer), parts_in(answer)
        then_ns, before = self._before or (now_ns, {})
        for age_s, event in _rounds(answer, before):
            yield max(then_ns, now_ns - int(age_s * 1e9)), SOURCE, event
        for event in self._news(now_ns, answer):
            yield now_ns, SOURCE, event
        self._before = (now_ns, answer)

    def begin_anew(self) -> bool:
        return False

    def places(self) -> dict[str, str]:
        return self._places

    def parts(self) -> list[list[str]]:
        return self._parts

    def _news(self, now_ns: int, answer: Mapping[str, Any]) -> Iterator[Event]:
        then_ns, before = self._before or (now_ns, {})
        if not before:
            yield _run(answer)
        if before.get("epoch") != answer.get("epoch"):
            level = str(answer.get("durability", "none"))
            yield events.SyncerStarted(
                str(answer.get("run")), self._options.address, 0, int(answer.get("epoch", 1)), level
            )
        members = {str(one.get("learner")): one for one in before.get("members", ())}
        for member in answer.get("members", ()):
            yield from _of_member(member, members.get(str(member.get("learner")), {}), now_ns - then_ns)
        for stream, counts in (answer.get("data") or {}).items():
            yield events.DataLedger(
                str(stream), **{name: int(count) for name, count in counts.items() if name in _LEASES}
            )
        for warning in answer.get("warnings", ()):
            if float(warning.get("time_s", 0)) > self._warned_s:
                yield events.Warned(str(warning.get("source")), str(warning.get("text")))
        self._warned_s = max([self._warned_s, *(float(w.get("time_s", 0)) for w in answer.get("warnings", ()))])
        if str(answer.get("degraded") or "") != str(before.get("degraded") or ""):
            wanted, reason = str(answer.get("durability", "none")), str(answer.get("degraded") or "")
            yield events.DurabilityChanged(
                "degraded" if reason else wanted, wanted, reason or "the disk takes writes again"
            )
        yield _stats(answer)


_LEASES = ("chunks", "issued", "done", "in_hand", "pool", "reissued", "repeated")


def _of_member(member: Mapping[str, Any], before: Mapping[str, Any], passed_ns: int) -> Iterator[Event]:
    learner, generation = str(member.get("learner")), int(member.get("generation", 1))
    if (member.get("state"), generation) != (before.get("state"), before.get("generation", generation)):
        yield events.MemberChanged(learner, generation, str(member.get("state")), "by its syncer's status")
    if bool(member.get("aside")) != bool(before.get("aside")):
        yield events.MemberAside(
            learner, generation, bool(member.get("aside")), str(member.get("aside") or "in time again")
        )
    tokens, step = int(member.get("tokens", 0)), int(member.get("step", 0))
    more, steps = tokens - int(before.get("tokens", tokens)), step - int(before.get("step", step))
    if more > 0 and passed_ns > 0:
        loss = member.get("loss")
        in_steps_ns = min(passed_ns, int(max(0, steps) * float(member.get("step_ms", 0)) * 1e6))
        yield events.LearnerSteps(
            learner, generation, step, max(0, steps), more, tokens, float(loss) if loss is not None else math.nan,
            in_steps_ns, 0, 0, 0, 0, int(member.get("behind", 0)),
        )  # fmt: skip


def _run(answer: Mapping[str, Any]) -> events.RunStarted:
    config: Mapping[str, Any] = answer.get("config") or {}
    return events.RunStarted(
        method="decoupled",
        learners=int(answer.get("expected", 0)),
        parameters=0,
        sync_every=int(config.get("sync_every", 0)),
        fragments=int(config.get("fragments", 0)),
        codec_up=str(config.get("codec_up", "")),
        codec_down=str(config.get("codec_down", "")),
        tokens_budget=int(config.get("tokens_budget", 0)),
        title=str(answer.get("title") or answer.get("run") or ""),
    )


def _rounds(answer: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[float, Event]]:
    """Every version that is newer than in the answer before, and how old it is by the syncer's clock, with who is in it
    where the syncer still knows. What it does not tell one by one is added up: commits, and bytes by learner."""
    known = dict(enumerate(before.get("versions", ())))
    newest = dict(enumerate(answer.get("versions", ())))
    told = [one for one in answer.get("rounds", ()) if int(one["version"]) > known.get(int(one["fragment"]), -1)]
    named = {int(one["fragment"]) for one in told}
    changed = [(f, int(v)) for f, v in newest.items() if v > known.get(f, 0) and f not in named]
    bare = [{"fragment": fragment, "version": version} for fragment, version in changed]
    now_s = float(answer.get("time_s", 0))
    for one in (*bare, *told):
        age_s = max(0.0, now_s - float(one.get("time_s", now_s)))
        yield from ((age_s, event) for event in _commit(one))
    commits = int(answer.get("commits", 0)) - int(before.get("commits", 0)) - len(bare) - len(told)
    up, down = _more(answer, before, "up_bytes"), _more(answer, before, "down_bytes")
    yield 0.0, events.RoundsFolded(max(0, commits), 0, 0, 0, 0, 0, up=up, down=down)


def _commit(one: Mapping[str, Any]) -> Iterator[Event]:
    fragment, number = int(one["fragment"]), int(one.get("round", 0))
    names = [str(name) for name in one.get("contributors", ())]
    if one.get("closed"):
        yield events.RoundClosed(number, fragment, names, 0, str(one["closed"]), 0, 0, 0)
    tokens, size = int(one.get("tokens", 0)), int(one.get("bytes", 0))
    yield events.Committed(fragment, int(one["version"]), number, names, tokens, 0, size, math.nan, math.nan, 0)


def _more(answer: Mapping[str, Any], before: Mapping[str, Any], name: str) -> dict[str, int]:
    """What each learner has of this more than before. A syncer that was started again counts from nothing."""
    earlier = {str(one.get("learner")): int(one.get(name, 0)) for one in before.get("members", ())}
    now = {str(one.get("learner")): int(one.get(name, 0)) for one in answer.get("members", ())}
    return {who: size - earlier.get(who, 0) if size >= earlier.get(who, 0) else size for who, size in now.items()}


def _stats(answer: Mapping[str, Any]) -> events.SyncerStats:
    def number(name: str) -> int:
        return int(answer.get(name, 0))

    return events.SyncerStats(
        clock_step=number("clock_step"),
        active=number("active"),
        commits=number("commits"),
        rounds_open=number("rounds_open"),
        contributions_merged=number("contributions_merged"),
        contributions_late=number("contributions_late"),
        bytes_up=number("bytes_up"),
        bytes_down=number("bytes_down"),
        tokens_processed=number("tokens_processed"),
        tokens_merged=number("tokens_merged"),
        tokens_pending=number("tokens_pending"),
        tokens_discarded={str(k): int(v) for k, v in (answer.get("tokens_discarded") or {}).items()},
        tokens_spent=int(answer.get("tokens_spent", -1)),
    )


def places_in(answer: Mapping[str, Any]) -> dict[str, str]:
    """The host that each learner is connected from."""
    return {
        str(one.get("learner")): str(one["from"]).rpartition(":")[0] or str(one["from"])
        for one in answer.get("members", ())
        if one.get("from")
    }


def parts_in(answer: Mapping[str, Any]) -> list[list[str]]:
    """What else belongs to the run: [what it is, where, what it has, its state], in people's words."""
    shards = [
        [f"shard {number}", str(one.get("address")), _fragments(one.get("fragments") or ()), _state(one.get("away"))]
        for number, one in enumerate(answer.get("shards", ()))
    ]
    relays = [
        ["relay", str(one.get("from")), _listed("learners", [str(name) for name in one.get("learners", ())]), "merges"]
        for one in answer.get("relays", ())
    ]
    standby: Mapping[str, Any] = answer.get("standby") or {}
    has = f"{int(standby.get('commits', 0)):,} commits, {bytes_text(int(standby.get('bytes', 0)))} sent"
    place = [["standby", str(standby["address"]), has, _state(standby.get("away"))]] if standby else []
    return (shards + relays + place)[:PARTS_MAX]


def _fragments(owned: Sequence[Any]) -> str:
    return _listed("fragments", [str(fragment) for fragment in owned])


def _listed(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return f"{what} {', '.join(names[:NAMES_MAX])}{more}" if names else f"no {what} yet"


def _state(away: Any) -> str:
    return f"away: {away}" if away else "serves"


def ask_status(options: ClientOptions) -> dict[str, Any]:
    return asyncio.run(fetch_status(options))


class SyncerPlaces:
    """From where the learners of a run folder come, and what else belongs to the run: its syncer is asked now and then,
    if it is there. Nobody waits for the answer."""

    def __init__(self, where: Callable[[], ClientOptions]) -> None:
        self._where = where
        self._asked_s = -math.inf
        self._known: dict[str, str] = {}
        self.parts: list[list[str]] = []
        """As of the last answer; nothing while the syncer is away."""
        self._thread: threading.Thread | None = None

    def __call__(self) -> dict[str, str]:
        busy = self._thread is not None and self._thread.is_alive()
        if not busy and time.monotonic() - self._asked_s > PLACES_S:
            self._asked_s = time.monotonic()
            self._thread = threading.Thread(target=self._ask, name="atoll-page places", daemon=True)
            self._thread.start()
        return self._known

    def _ask(self) -> None:
        found: list[list[str]] = []
        with contextlib.suppress(AtollError, OSError):  # it is away, or the run is over: where learners were stays
            answer = ask_status(self._where())
            self._known, found = places_in(answer), parts_in(answer)
        self.parts = found
