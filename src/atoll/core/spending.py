"""What counts of each learner's claimed tokens for the run's budget: a claim alone ends no run.

The ledger takes down every token as it is claimed. For the budget (and for an outer schedule, which goes by it) a
learner's tokens count up to the larger of two measures, and a burst:

    unasked     as many as the low median of all makes in the time that it has been here: its pace, and its size or the
                one that was declared with this learner's key
    shown       what is inside versions of its contributions, up to a rate: twice the usual one at first. Claims that
                were beyond it for a whole window of SPEND_PERIODS double it; one that a window has kept to counts for
                all of the learner's time, so that nothing of a fast learner is lost

So a report costs nothing however bold it is: what is unasked everybody has. A learner that contributes what it claims
gets two shares, then four, a window each. Declared sizes bound that: PACE_FACTOR times the declared size is the most.

After a syncer came back nobody knows how long it was gone. What its learners did meanwhile counts up to the low median
of what those say who were in the run; whoever has not come back says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from atoll.core.config import SyncConfig
from atoll.core.ledger import Account, Ledger, Spend
from atoll.core.membership import Member, Membership, MemberState
from atoll.core.plausible import SPEND_PERIODS, SPEND_SLACK, STEP_NS_MIN, rate_confirmed, rate_limit, steps_burst
from atoll.core.policy import low_median
from atoll.core.sizes import LearnerSizes


class Spending:
    """The budget ends the run for all: it must be spent by work that merges show."""

    def __init__(self, config: SyncConfig, membership: Membership, ledger: Ledger, sizes: LearnerSizes) -> None:
        self._config = config
        self._membership = membership
        self._ledger = ledger
        self._sizes = sizes
        self._pace_ns = 0.0
        self._past_at = (-1, -1)
        self._past = 0
        self._pasts_told = 0

    def judge(self, member: Member, now_ns: int) -> bool:
        """Take down what of a learner's tokens does not count. True if that has become more."""
        account = self._ledger.account(member.learner, member.generation)
        if self._config.sizes == "claimed" or self._membership.joined_max <= 1:
            return False
        possible = self._possible(member, account, now_ns)
        before, account.excess = account.excess, max(0, account.processed - int(min(possible, account.processed)))
        return account.excess > before

    def _possible(self, member: Member, account: Account, now_ns: int) -> float:
        spend, usual = account.spend, self._sizes.usual_lately()
        if spend.looked_ns < 0:
            self._begin(member, account, now_ns)
        self._let_pass(spend, now_ns, member.tokens_per_step_declared or usual)
        shown = self._show(spend, account, member.tokens_per_step_declared, usual)
        burst = steps_burst(self._config) * max(spend.rate, self._sizes.limit(member.learner, usual))
        return spend.before + min(spend.past, self._past_usual()) + max(spend.unasked, shown) + burst

    def _begin(self, member: Member, account: Account, now_ns: int) -> None:
        spend = account.spend
        spend.looked_ns = min(now_ns, member.joined_ns or now_ns)
        spend.merged_before = spend.window_merged = _merged(account)
        spend.past = account.processed - spend.before if spend.with_past else 0
        self._pasts_told += 1

    def _let_pass(self, spend: Spend, now_ns: int, size: float) -> None:
        """The usual learner has taken some more steps. One that is alone is held against those who were there."""
        if self._membership.counted() > 1 or not self._pace_ns:
            self._pace_ns = usual_pace_ns(self._membership.counted_paces()) or self._pace_ns
        passed = max(0, now_ns - spend.looked_ns) / max(STEP_NS_MIN, self._pace_ns) if self._pace_ns else 0.0
        spend.looked_ns, spend.steps = now_ns, spend.steps + passed
        spend.unasked += passed * size

    def _show(self, spend: Spend, account: Account, declared: int, usual: float) -> float:
        """What its contributions have shown, with those of the window that is open."""
        merged, steps = _merged(account) - spend.window_merged, spend.steps - spend.window_steps
        limit = rate_limit(declared, spend.limit, usual)
        here = min(merged, limit * steps)
        if steps < SPEND_PERIODS * self._config.sync_every:
            return spend.shown + here
        spend.shown, spend.window_steps, spend.window_merged = spend.shown + here, spend.steps, _merged(account)
        spend.rate = here / steps
        if merged > here:
            spend.limit = rate_confirmed(merged / steps, limit)
        else:
            everything = float(_merged(account) - spend.merged_before)
            spend.shown = max(spend.shown, min(everything, spend.rate * spend.steps))
        return spend.shown

    def _past_usual(self) -> int:
        """What the low median of those who were in the run says that it did while no syncer was there."""
        now = (self._membership.stamp, self._pasts_told)
        if self._past_at != now:
            here = [m for m in self._membership.members.values() if m.state is not MemberState.LEFT]
            spends = [(m, self._ledger.account(m.learner, m.generation).spend) for m in here]
            said = sorted(max(0, spend.past) for m, spend in spends if m.recovered or spend.with_past)
            self._past_at, self._past = now, int(low_median(said))
        return self._past


def usual_pace_ns(paces: Sequence[float]) -> float:
    """What a step of the usual learner takes; `paces` in order. Of two learners the faster may be one that says a
    nanosecond: unasked it counts as SPEND_SLACK times as fast as the other (draw 4, seed 3966: a run that had lost its
    third learner was over in its first second)."""
    return max(low_median(paces), paces[len(paces) // 2] / SPEND_SLACK) if paces else 0.0


def _merged(account: Account) -> int:
    """Tokens inside versions: fragments merge on their own, and on the whole bring the same."""
    return sum(account.merged) // account.fragments
