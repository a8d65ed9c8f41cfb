"""Where a learner is, as it reports after steps: its place in the run, its tokens, and what it will be asked for."""

from __future__ import annotations

from atoll.core.effects import Note, SyncerEffect, ToLearner
from atoll.core.membership import Member, MemberState
from atoll.core.messages import STEP_MAX, Progress, Upcoming
from atoll.core.policy import moving_average, upcoming_steps
from atoll.core.syncer_recovery import SyncerRecovery
from atoll.core.syncer_state import SyncerState, changed, warned
from atoll.core.twins import EQUAL_IN_A_ROW, Twins


class ProgressIntake:
    def __init__(self, state: SyncerState, recovery: SyncerRecovery) -> None:
        self._state = state
        self._recovery = recovery
        self._twins = Twins()

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
        member.loss, member.bases = message.loss, message.bases
        if (pair := self._twins.report(member.learner, message.step, message.loss)) is not None:
            out.append(_twins_found(*pair))
        step_ns = moving_average(member.step_ns, float(message.step_ns)) if message.step_ns > 0 else member.step_ns
        self._state.membership.moved(member, message.step, step_ns)
        self._account(member, message)
        self.tell_upcoming(member, out)
        return ""

    def _wrong_with(self, member: Member, message: Progress) -> str:
        """What in this report cannot be true; empty: it can."""
        if message.steps < member.steps or message.tokens < member.tokens or message.step < member.step:
            return "counters that go backwards"
        fragments = self._state.config.fragments
        if len(message.bases) != fragments or any(not 0 <= d.fragment < fragments for d in message.discarded):
            return "fragments that this run does not have"
        return "counters that cannot be" if message.step > STEP_MAX else ""

    def _account(self, member: Member, message: Progress) -> None:
        account = self._state.ledger.account(member.learner, member.generation)
        account.report(message.tokens, message.discarded)
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


def _twins_found(one: str, other: str) -> Note:
    return warned(
        f"learners {one!r} and {other!r} report {EQUAL_IN_A_ROW} losses in a row that are equal to the last digit, "
        "so that they seem to read the same data; choose it by learner.rank (or ATOLL_RANK, which must differ), or "
        "share it out with atoll.data"
    )
