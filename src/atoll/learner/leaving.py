"""Leaving: handing over, how much of the last progress the syncer took, and the sentence for what it did not take."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from atoll.codec import fragment_codec
from atoll.core import WAIT_SLICE_NS, Layout, LearnerMachine, Refusal
from atoll.core import effects as fx
from atoll.errors import RefusedError
from atoll.learner.leave_deadline import LeaveDeadline
from atoll.learner.shell import LearnerShell

WAIT_SLICE_S = WAIT_SLICE_NS / 1e9
EXIT_NOT_HANDED_OVER = 4
"""Exit status of a learner that could not hand over its last progress in time, however it came to leave."""
EXIT_IDLE = 1
"""Exit status of a learner that joined and never called `step`."""
SIGNALS = ("SIGTERM", "SIGINT")
"""Reasons for leaving behind which somebody stands who kills."""
NEVER_STEPPED = "learner.step was never called: nothing was trained; call it once per optimizer step"


def hand_over(
    shell: LearnerShell,
    address: str,
    stand: Callable[[], None],
    deadline: LeaveDeadline,
    *,
    told: Callable[[], bool] = lambda: False,
    flush: bool,
    reason: str,
) -> tuple[int, str]:
    """Hand over, say goodbye, and wait for the syncer's word. Returns the tokens that it does not have, and why.
    `stand` waits a while at the boundary, and does what there is to do there. `told`: whether SIGTERM has come."""
    began = time.monotonic()
    with shell.changed:
        assert shell.layout is not None
        leaving = HandOver(shell.machine, shell.layout)
        if shell.failure is None:
            shell.apply(fx.Closing(flush, reason))
    _wait_for_word(shell, deadline, stand, leaving, lambda: not flush or reason in SIGNALS or told())
    with shell.changed:
        if not flush or _let_go(shell):
            return 0, ""
        tokens = leaving.tokens(linked=shell.linked)
        if not tokens:
            return 0, ""  # only the goodbye was not heard: all that was trained is in published versions
        if shell.failure is not None:
            return tokens, str(shell.failure)
        now = time.monotonic()
        times = {"down_s": now - shell.down_at_s, "waited_s": now - began}
        return tokens, leaving.why(address=address, linked=shell.linked, **times)


def _wait_for_word(
    shell: LearnerShell, deadline: LeaveDeadline, stand: Callable[[], None], leaving: HandOver, told: Callable[[], bool]
) -> None:
    """The syncer ends the session when everything that was handed over is safe with it."""
    while True:
        with shell.changed:
            left = shell.driver.left
            if _let_go(shell) or shell.failure is not None or _is_over(shell, deadline, leaving, told=told()):
                return
            if left:
                shell.changed.wait(WAIT_SLICE_S)
        if not left:
            stand()


def _is_over(shell: LearnerShell, deadline: LeaveDeadline, leaving: HandOver, *, told: bool) -> bool:
    left = shell.driver.left
    bytes_left, rate = leaving.to_move(shell) if shell.linked and not left else (0, 0.0)
    moved = (leaving.answered, shell.driver.fetches.arriving.count, shell.driver.link.session, left)
    return deadline.is_over(time.monotonic(), told=told, moved=moved, bytes_left=bytes_left, rate=rate, left=left)


def _let_go(shell: LearnerShell) -> bool:
    return shell.driver.left and not shell.linked


def run_closed(failure: Exception | None) -> bool:
    """True if this learner came back to a run that was over."""
    return isinstance(failure, RefusedError) and failure.code == Refusal.CLOSED


class HandOver:
    """One leaving, from its beginning. The caller holds the shell's lock."""

    def __init__(self, machine: LearnerMachine, layout: Layout) -> None:
        self._machine = machine
        self._layout = layout
        self._before = [answered for answered, _ in machine.handed_over]

    def tokens(self, *, linked: bool) -> int:
        """Tokens that the syncer does not have. While it answers, it has what it accepted; one that is gone may not
        have written that down, so then everything counts that is in no published version."""
        fragments = self._layout.fragments
        missing = self._machine.unanswered_tokens if linked else self._machine.pending_tokens
        share = sum(tokens * f.parameters for tokens, f in zip(missing, fragments, strict=True))
        return -(-share // sum(f.parameters for f in fragments))

    @property
    def answered(self) -> int:
        return sum(answered for answered, _ in self._machine.handed_over)

    def to_move(self, shell: LearnerShell) -> tuple[int, float]:
        """Bytes that are still to go out, or must come in first, and how many move in a second, as far as is known."""
        taken, wanted = self.bytes()
        down = sum(4 * self._layout.fragments[index].size for index in self._machine.to_fetch_first)
        up_rate, down_rate = shell.rate_up, shell.driver.fetches.arriving.rate
        rates = [rate for rate, size in ((up_rate, wanted - taken), (down_rate, down)) if size and rate]
        return wanted - taken + down, min(rates, default=0.0)

    def bytes(self) -> tuple[int, int]:
        """(encoded bytes that the syncer took since the beginning, those that there were to give), at most."""
        name = self._machine.config.codec_up
        taken = waiting = 0
        given = zip(self._machine.handed_over, self._before, self._layout.fragments, strict=True)
        for (answered, to_give), before, fragment in given:
            size = fragment_codec(name, self._layout, fragment.index).size_max(fragment.size)
            taken += size * (answered - before)
            waiting += size * to_give
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
        f"learner {learner!r} could not hand over {tokens:,} tokens, which may be lost: {why}; {kept}"
        f"ATOLL_LEARNER={learner} again continues"
    )
