"""Leaving: handing over, how much of the last progress the syncer took, and the sentence for what it did not take."""

from __future__ import annotations

import time
from pathlib import Path

from atoll.codec import get_codec
from atoll.core import CLOSE_TIMEOUT_NS, LET_GO_NS, WAIT_SLICE_NS, FragmentProgress, LearnerMachine, Refusal
from atoll.core import effects as fx
from atoll.errors import RefusedError
from atoll.learner.shell import LearnerShell
from atoll.learner.vault import Vault

CLOSE_TIMEOUT_S = CLOSE_TIMEOUT_NS / 1e9
LET_GO_S = LET_GO_NS / 1e9
WAIT_SLICE_S = WAIT_SLICE_NS / 1e9
EXIT_NOT_HANDED_OVER = 4
"""Exit status of a learner that was told to leave (SIGTERM) and could not hand over its last progress in time."""
NEVER_STEPPED = "learner.step was never called: nothing was trained; call it once per optimizer step"


def hand_over(engine: LearnerShell, address: str, *, flush: bool, reason: str) -> tuple[int, str]:
    """Hand over, say goodbye, and wait for the syncer's word. Returns the tokens that it does not have, and why."""
    began = time.monotonic()
    with engine.changed:
        assert engine.vault is not None
        leaving = HandOver(engine.machine, engine.vault)
        if engine.failure is None:
            engine.apply(fx.Closing(flush, reason))
        _wait_for_word(engine, began + CLOSE_TIMEOUT_S)
        if not flush or run_closed(engine.failure) or _let_go(engine):
            return 0, ""
        tokens = leaving.tokens(linked=engine.linked)
        if not tokens:
            return 0, ""  # only the goodbye was not heard: all that was trained is in published versions
        if engine.failure is not None:
            return tokens, str(engine.failure)
        now = time.monotonic()
        times = {"down_s": now - engine.down_at_s, "waited_s": now - began}
        return tokens, leaving.why(address=address, linked=engine.linked, **times)


def _wait_for_word(engine: LearnerShell, deadline: float) -> None:
    while not engine.driver.left and engine.failure is None and time.monotonic() < deadline:
        engine.changed.wait(WAIT_SLICE_S)
        engine.apply(fx.Boundary())
    # The syncer ends the session when everything that was handed over is safe with it.
    deadline = max(deadline, time.monotonic() + LET_GO_S)
    while not _let_go(engine) and engine.failure is None and time.monotonic() < deadline:
        engine.changed.wait(WAIT_SLICE_S)
        if not engine.driver.left:
            engine.apply(fx.Boundary())


def _let_go(engine: LearnerShell) -> bool:
    return engine.driver.left and not engine.linked


def run_closed(failure: Exception | None) -> bool:
    """True if this learner came back to a run that was over."""
    return isinstance(failure, RefusedError) and failure.code == Refusal.CLOSED


class HandOver:
    """One leaving, from its beginning. The caller holds the engine's lock."""

    def __init__(self, machine: LearnerMachine, vault: Vault) -> None:
        self._machine = machine
        self._vault = vault
        self._before = [_pushed(progress) for progress in machine.fragments]

    def tokens(self, *, linked: bool) -> int:
        """Tokens that the syncer does not have. While it answers, it has what it accepted; one that is gone may not
        have written that down, so then everything counts that is in no published version."""
        fragments = self._vault.layout.fragments
        share = sum(_missing(p, linked) * f.parameters for p, f in zip(self._machine.fragments, fragments, strict=True))
        return -(-share // sum(f.parameters for f in fragments))

    def bytes(self) -> tuple[int, int]:
        """(encoded bytes that the syncer took since the beginning, those that there were to give), at most."""
        codec = get_codec(self._vault.config.codec_up)
        taken = waiting = 0
        for progress, before in zip(self._machine.fragments, self._before, strict=True):
            size = codec.size_max(self._vault.layout.fragments[progress.index].size)
            taken += size * (_pushed(progress) - before)
            waiting += size * (progress.next_seq - _pushed(progress) + (progress.local.steps > 0))
        return taken, taken + waiting

    def why(self, *, address: str, linked: bool, down_s: float, waited_s: float) -> str:
        """Why the syncer's word is missing that all of it is on its disk."""
        taken, wanted = self.bytes()
        if not linked:
            return f"the syncer at {address} cannot be reached since {down_s:.0f} s"
        if taken < wanted:
            return f"the link is too slow, {taken:,} of {wanted:,} bytes went out in {waited_s:.0f} s"
        return f"the syncer at {address} has not said within {waited_s:.0f} s that they are safe"


def sentence(learner: str, tokens: int, why: str, checkpoint: Path | None) -> str:
    """What a learner says that leaves without its last progress being safe."""
    kept = f"its checkpoint is kept in {checkpoint}, " if checkpoint is not None else ""
    return (
        f"learner {learner!r} could not hand over {tokens:,} tokens, which are lost: {why}; {kept}"
        f"ATOLL_LEARNER={learner} again continues"
    )


def _pushed(progress: FragmentProgress) -> int:
    """Contributions of this fragment that the syncer has answered."""
    return progress.next_seq - sum(not sent.pushed for sent in progress.outstanding)


def _missing(progress: FragmentProgress, linked: bool) -> int:
    if not linked:
        return progress.pending_tokens
    return progress.local.tokens + sum(sent.counters.tokens for sent in progress.outstanding if not sent.pushed)
