"""A learner says hello: may it join, and its place in the books.

What a Hello says of itself is checked in `admission`; which run it belongs to is decided in `run_selection`.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.core.admission import check_hello, check_settings, codec_up_for
from atoll.core.effects import SessionOpened, SyncerEffect
from atoll.core.identity import SECRET_PROTOCOL, Identity, NewIds, check_learner
from atoll.core.inner_slots import INNER_PROTOCOL
from atoll.core.layout import build_layout, elements_of
from atoll.core.membership import CLAIMED_MAX, Member
from atoll.core.messages import PROTOCOL_VERSION, Hello, Refusal, Refused
from atoll.core.policy import fragments_for
from atoll.core.ranks import rank_of
from atoll.core.run_selection import RunSelection
from atoll.core.syncer_state import SyncerState, warned
from atoll.errors import LayoutError


class HelloIntake:
    """Every reason to keep a learner out is in one place, before membership hears of it."""

    def __init__(self, state: SyncerState, selection: RunSelection) -> None:
        self._state = state
        self._selection = selection
        self._new_ids = NewIds()

    def check(self, event: SessionOpened, stopping: str, now_ns: int, out: list[SyncerEffect]) -> Refused | None:
        """None if this learner may join. `stopping` is why the run ends, if it does."""
        hello = event.hello
        refusal = check_learner(event.identity, hello.learner) or _check_protocol(hello, event.identity)
        if refusal is not None:
            return refusal
        if self._selection.fresh and not self._state.membership.connected():
            self._state.layout = None  # whoever fixed it is gone and gave no parameters
        gives_way = self._selection.gives_way(hello)  # then neither its layout nor its members count
        layout, known = (
            (None, None) if gives_way else (self._state.layout, self._state.membership.members.get(hello.learner))
        )
        refusal = check_hello(hello, self._state.run, layout, known) or check_settings(hello, self._state.config)
        if refusal is not None:
            return refusal
        if stopping and not _may_hold_progress(hello, self._state.membership.members.get(hello.learner)):
            return Refused(Refusal.CLOSED, f"the run is over ({stopping}); start a new one to train on")
        if event.identity is None and hello.learner not in self._state.membership.members:
            refusal = self._new_ids.check(now_ns)
        return refusal or self._selection.meet(hello, now_ns, out) or self._fix_layout(hello)

    def _fix_layout(self, hello: Hello) -> Refused | None:
        """The first learner says what the model looks like."""
        if self._state.layout is not None:
            return None
        parameters = sum(map(elements_of, hello.tensors))
        given = self._state.given
        try:
            self._state.lay_out(
                build_layout(hello.tensors, given.fragments or fragments_for(parameters, given.sync_every))
            )
        except LayoutError as error:
            return Refused(Refusal.LAYOUT, str(error))
        return None

    def claimed(self, hello: Hello) -> int:
        """The generation that this learner was given earlier in this run, by its own word; 0: none."""
        return hello.generation if hello.run == self._state.run and hello.generation <= CLAIMED_MAX else 0

    def admit(self, event: SessionOpened, now_ns: int) -> tuple[Member, Member | None]:
        """The learner's place in the books; and, if a newer process took its id over, who is fenced out."""
        hello = event.hello
        claimed = self.claimed(hello)
        known = self._state.membership.members.get(hello.learner)
        if known is None and event.identity is None:
            self._new_ids.count()
        member, fenced = self._state.membership.admit(
            hello.learner, hello.instance, event.session, now_ns, self._state.config.fragments, claimed
        )
        member.protocol = min(hello.protocol, PROTOCOL_VERSION)
        member.secret = event.secret if member.protocol >= SECRET_PROTOCOL else ""
        member.codec_up = codec_up_for(hello, self._state.config)
        member.codecs, member.any_update = frozenset(hello.codecs), hello.any_update
        member.revoked = ""
        member.tokens_per_step_declared = event.identity.tokens_per_step if event.identity is not None else 0
        member.newcomer, member.start_step = not hello.bases, -1
        if claimed and (fenced is not None or known is None):
            # It was in the run before, and the record that this syncer continues from is older than that.
            member.recovered = member.unbalanced = True
        member.rank = rank_of(
            member, known, self._state.membership.members.values(), self._state.config.learners_expected
        )
        member.wants_inner = hello.wants_inner and member.protocol >= INNER_PROTOCOL
        if fenced is not None:
            self._state.retire(fenced)
            self._state.leases.release(fenced.learner, before_generation=member.generation)
        self._state.prune_members()
        self._state.ledger.set_gone(member.learner, member.generation, False)
        self._state.remember_member(member)
        self._state.hellos[member.learner] = replace(hello, tensors=())  # the layout has them
        return member, fenced

    def compare_frozen(self, hello: Hello, out: list[SyncerEffect]) -> None:
        """Frozen parameters never travel: learners whose own differ train different models, and nothing else tells.
        Said once for each process, which has no generation yet when it first comes."""
        first, checksum = self._state.frozen
        if not checksum:
            self._state.frozen = (hello.learner, hello.frozen)
        elif hello.frozen not in (0, checksum) and not hello.generation:
            text = (
                f"the frozen parameters of learner {hello.learner!r} differ from those of {first!r}, and they are "
                "never sent, so these two train different models; load the same frozen weights in every learner "
                "before it makes its Learner"
            )
            out.append(warned(text))


def _may_hold_progress(hello: Hello, known: Member | None) -> bool:
    """A process whose link broke while the run ended, or while it left, comes back to hand over what it holds. In a
    recorded trial one behind 50 kbit/s lost 90,112 tokens here (docs/results/hosts.md)."""
    return known is not None and (known.instance, known.generation) == (hello.instance, hello.generation)


def _check_protocol(hello: Hello, identity: Identity | None) -> Refused | None:
    """Where each learner has its key, nobody may push or fetch without a secret."""
    if identity is None or hello.protocol >= SECRET_PROTOCOL:
        return None
    return Refused(
        Refusal.PROTOCOL,
        f"this run has a key for each learner, and learner {hello.learner!r} speaks protocol {hello.protocol}, which "
        f"knows no secrets ({SECRET_PROTOCOL} does); install the syncer's version of atoll where it runs",
    )
