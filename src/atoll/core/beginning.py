"""Who may give a run its first parameters.

A syncer that finds no state cannot tell a new run from one whose record was lost. The learners can: each says in its
Hello which run it was in, which versions it holds and their checksums. So the rules are:

    a learner that holds versions    the run goes on from what it and others hold (`healing`), under its own name and
                                     with its own version numbers
    one that was in a run and cannot its parameters seed a new run, once those who could do better have had their time
    give its versions                (it speaks an older protocol, or was between two runs)
    a newcomer                       seeds a new run, unless there is reason to think that the run had versions

Where there is such a reason, newcomers must say hello again: for ever where it is certain, for HEAL_WAIT_NS where it
is a doubt. A newcomer whose seed was never merged with anything gives way to a learner that holds a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.config import SyncConfig
from atoll.core.healing import HEAL_WAIT_NS
from atoll.core.membership import CLAIMED_MAX
from atoll.core.messages import Hello

HEAL_PROTOCOL = 2
"""The protocol that knows how to bring versions back."""
EPOCH_CLAIMED_MAX = 10**9
"""An epoch that a learner may claim to have seen: a restart every second for thirty years. The store counts on from it
to a thousand times that, so that no claim uses its numbers up."""
EPOCHS_SKIPPED = 1000
"""Epochs left out where the count goes on from a snapshot's or a learner's: restarts since then are not in it."""
SAID_MAX = 1000
"""Different warnings that are told once each: a learner that is refused comes back every few seconds."""


@dataclass(frozen=True, slots=True)
class Begin:
    """What the operator and the disk say about a syncer that may have to begin without state."""

    had_versions: str = ""
    """How it is known that the run had versions: only a learner that holds them can begin it again."""
    doubt: str = ""
    """Why it may have had some: newcomers wait a short time for somebody who holds them."""
    said: bool = False
    """The operator has heard of the doubt, and of the wait: it is not to be told twice."""
    learners: int = 0
    """How many newcomers are enough not to wait for more while in doubt; 0 where nobody said how many there are."""
    new_run: bool = False
    """By the operator's word nothing of an earlier run is taken up, whoever holds it."""
    takes_strangers: bool = False
    """A learner that holds another run than this syncer's is taken in, and what it held is given up. Else it is refused
    for the time being, so that its parameters live until the operator has decided."""


def holds_run(hello: Hello) -> bool:
    """True if this learner was in a run and adopted its parameters."""
    return bool(hello.run and hello.bases)


def can_give(hello: Hello) -> bool:
    """True if this learner holds a version of every fragment and can prove and bring it."""
    known = len(hello.checksums) == len(hello.bases) and all(hello.checksums) and min(hello.bases, default=-1) >= 0
    sane = hello.epoch <= EPOCH_CLAIMED_MAX and 0 < hello.generation <= CLAIMED_MAX
    return holds_run(hello) and hello.protocol >= HEAL_PROTOCOL and known and sane


class Beginning:
    """What was heard before the run has begun."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin
        self._first_ns = -1
        self._holder_ns = -1
        """When somebody who was in a run, and cannot give its versions, was first heard."""
        self._heard_ns = -1
        """When such a one was last heard."""
        self._newcomers: set[str] = set()
        self._said: set[str] = set()
        self.waits = ""
        """What the operator should know while the run cannot begin or a learner cannot be taken in."""

    @property
    def unsaid(self) -> str:
        """`waits`, but for what the operator was told when the syncer began."""
        return "" if self._is_told(self.waits) else self.waits

    def _is_told(self, text: str) -> bool:
        return self.begin.said and text.startswith(self.begin.doubt)

    def is_news(self, text: str) -> bool:
        """True the first time that something is said: whoever is refused comes back every few seconds."""
        if self._is_told(text) or text in self._said or len(self._said) >= SAID_MAX:
            return False
        self._said.add(text)
        return True

    def why_wait(self, hello: Hello, now_ns: int, config: SyncConfig) -> str:
        """Why this learner may not seed the run now; empty if it may."""
        begin = self.begin
        if begin.new_run:
            return ""
        if holds_run(hello):
            self._holder_ns = now_ns if self._holder_ns < 0 else self._holder_ns
            self._heard_ns = now_ns
            waits = now_ns < self._holder_ns + HEAL_WAIT_NS
            return f"learners that can bring run {hello.run} back have {heal_wait()} to say hello" if waits else ""
        if begin.had_versions:
            return (
                f"this run had versions ({begin.had_versions}), none of its state is left, and a newcomer's random "
                "parameters must not replace it. The syncer waits for a learner that holds the run; if none is left, "
                "start the syncer again with --new-run"
            )
        if self._heard_ns >= 0 and now_ns < self._heard_ns + config.lost_after_ns:
            return "a learner that was in a run gives it its parameters"
        return self._doubt(hello.learner, now_ns) if begin.doubt else ""

    def _doubt(self, learner: str, now_ns: int) -> str:
        self._first_ns = now_ns if self._first_ns < 0 else self._first_ns
        if len(self._newcomers) < SAID_MAX:
            self._newcomers.add(learner)
        enough = self.begin.learners and len(self._newcomers) >= self.begin.learners
        if enough or now_ns >= self._first_ns + HEAL_WAIT_NS:
            return ""
        return (
            f"{self.begin.doubt}; learners that hold an earlier run have {heal_wait()} to say hello before a new one "
            "begins (--new-run begins at once)"
        )


def heal_wait() -> str:
    return f"{HEAL_WAIT_NS / 1e9:g} s"
