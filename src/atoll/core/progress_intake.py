"""Where a learner is, as it says when it is ready and after steps: its place in the run, its tokens, and what it will
be asked for. What of it counts is decided by `plausible`."""

from __future__ import annotations

from atoll.core.effects import Note, SyncerEffect, ToLearner
from atoll.core.membership import Member, MemberState
from atoll.core.messages import STEP_MAX, Progress, Ready, Upcoming
from atoll.core.plausible import AWAY_STEPS_MAX, discards_fit, step_credit, steps_burst
from atoll.core.policy import low_median, moving_average, upcoming_steps
from atoll.core.syncer_recovery import SyncerRecovery
from atoll.core.syncer_state import SyncerState, changed, warned
from atoll.core.twins import EQUAL_IN_A_ROW, STEPS_HEARD, Echoes, Twins


class ProgressIntake:
    """Claims are bounded before they reach the clock: one learner's step count must not move everybody's rounds."""

    def __init__(self, state: SyncerState, recovery: SyncerRecovery) -> None:
        self._state = state
        self._recovery = recovery
        self._twins = Twins()
        self._echoes = Echoes()

    def ready(self, member: Member, message: Ready, now_ns: int, *, past: bool) -> str:
        """Take in where a learner begins. `past`: this run is older than this syncer's memory of it, so that learners
        may have come further than is known here. Returns what in it cannot be true; then nothing was changed."""
        if message.step > STEP_MAX:
            return "a step that nobody can have reached"
        if member.newcomer and message.step > max(member.start_step, member.step):
            return f"step {message.step}, and was told to begin at {member.start_step}"
        book = self._state.book
        if not member.newcomer and not member.step_counted:
            member.step_counted = min(message.step, book.clock_last + (AWAY_STEPS_MAX if past else 0))
        elif member.newcomer and not member.steps:
            member.step_counted = message.step
        if past and not member.newcomer:
            self._state.ledger.account(member.learner, member.generation).spend.with_past = True
        if not member.credit_ns:
            member.credit, member.credit_ns = float(steps_burst(self._state.config)), now_ns
        member.bases, member.behind_ns = message.bases, 0
        counted = member.launch_step = self._counted(member, message.step, now_ns)
        self._state.membership.moved(member, message.step, counted, member.step_ns)
        return ""

    def _counted(self, member: Member, step: int, now_ns: int) -> int:
        """How far this learner can have come. Where everybody waits for everybody, and of one that is alone, the clock
        is what they say."""
        membership = self._state.membership
        if self._state.config.synchronous or membership.counted() <= 1:
            return step
        # What was not used before is not saved up, or a learner could jump by as far as it has come.
        burst = steps_burst(self._state.config)
        saved = member.credit if member.credit < burst else burst
        member.credit = saved + step_credit(now_ns - member.credit_ns, low_median(membership.counted_paces()))
        member.credit_ns = now_ns
        gained = max(0, min(step - member.step_counted, int(member.credit)))
        member.credit -= gained
        return member.step_counted + gained

    def take(self, member: Member, message: Progress, now_ns: int, out: list[SyncerEffect]) -> str:
        """Take a report in. Returns what in it cannot be true; then nothing was changed."""
        wrong = self._wrong_with(member, message)
        if wrong:
            return wrong
        if member.state is MemberState.AWAY and member.bases:
            self._state.membership.activate(member, now_ns)  # it was only silent, its session never broke
            out.append(changed(member, "heard again"))
        elif member.state is MemberState.LOST and member.bases:
            self._state.ledger.set_gone(member.learner, member.generation, False)
            self._state.membership.activate(member, now_ns)
            self._state.remember_member(member)
            out.append(changed(member, "came back"))
        member.steps, member.tokens = message.steps, message.tokens
        if message.bases != member.bases:
            member.behind_ns = 0
            self._state.book.adaptive.adopted(member.learner, message.bases, now_ns)
        member.loss, member.bases = message.loss, message.bases
        if (pair := self._twins.report(member.learner, message.step, message.loss)) is not None:
            out.append(_twins_found(pair, f"report {EQUAL_IN_A_ROW} losses in a row that are equal to the last digit"))
        elif (pair := self._echoes.report(member.learner, message.steps, message.loss)) is not None:
            out.append(_twins_found(pair, f"have losses that rise and fall together in {STEPS_HEARD} steps"))
        step_ns = moving_average(member.step_ns, float(message.step_ns)) if message.step_ns > 0 else member.step_ns
        member.steps_before = message.step - message.steps
        self._state.membership.moved(member, message.step, self._counted(member, message.step, now_ns), step_ns)
        self._account(member, message, now_ns)
        self.tell_upcoming(member, out)
        return ""

    def _wrong_with(self, member: Member, message: Progress) -> str:
        """What in this report cannot be true; empty: it can."""
        if message.steps < member.steps or message.tokens < member.tokens or message.step < member.step:
            return "counters that go backwards"
        if member.steps_before >= 0 and message.step - message.steps != member.steps_before:
            return "a step that its own steps do not lead to"
        fragments = self._state.config.fragments
        if len(message.bases) != fragments or [d for d in message.discarded if not 0 <= d.fragment < fragments]:
            return "fragments that this run does not have"
        possible = message.steps <= message.step <= STEP_MAX and discards_fit(message.tokens, message.discarded)
        return "" if possible else "counters that cannot be"

    def _account(self, member: Member, message: Progress, now_ns: int) -> None:
        account = self._state.ledger.account(member.learner, member.generation)
        account.report(message.tokens, message.discarded)
        self._state.judge_tokens(member, now_ns)
        current = message.tokens >= account.processed  # not overtaken by a contribution, which implies a later count
        active = self._state.committed and member.state is MemberState.ACTIVE
        if member.unbalanced and message.pending and current and active:
            self._recovery.balance(member, message.pending)

    def tell_upcoming(self, member: Member, out: list[SyncerEffect]) -> None:
        """Which fragments it should keep a snapshot of, if that has changed."""
        upcoming = self._state.book.upcoming(upcoming_steps(member.step_ns, self._state.book.step_ns()))
        if upcoming != member.upcoming and member.connected:
            member.upcoming = upcoming
            out.append(ToLearner(member.session, Upcoming(upcoming)))


def _twins_found(pair: tuple[str, str], what: str) -> Note:
    return warned(
        f"learners {pair[0]!r} and {pair[1]!r} {what}, so that they seem to read the same data; choose it by "
        "learner.rank (or ATOLL_RANK, which must differ), or share it out with atoll.data"
    )
