"""What is said of a version that was made and committed: to everybody in the run, and to the event log.

The scheduler has counted it by then. Nothing here changes anything, so the order in which learners hear of it is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.core.effects import MergeFinished, ToLearner
from atoll.core.events import Committed
from atoll.core.membership import Member
from atoll.core.messages import Published
from atoll.core.rounds import ContributionRecord, FragmentTrack, Round

DUE_STEP_PROTOCOL = 2
"""Learners of older protocols are not told when a fragment is next due; they know `sync_every`."""


def notices(track: FragmentTrack, opened: Round, members: Iterable[Member], contributors: int) -> list[ToLearner]:
    """Each learner hears which of its own contributions are inside: it must not add that progress again. What is the
    same for many is one message, which is encoded once."""
    said: dict[tuple[int, int], Published] = {}
    told = []
    for member in members:
        merged_seq = max((s for s, v in member.merged[track.index] if v == track.version), default=-1)
        due_step = opened.next_due_step if member.protocol >= DUE_STEP_PROTOCOL else 0
        message = said.get((merged_seq, due_step))
        if message is None:
            message = said[merged_seq, due_step] = Published(
                track.index,
                track.version,
                opened.number,
                track.checksum,
                merged_seq,
                contributors,
                opened.clock_step,
                due_step=due_step,
            )
        told.append(ToLearner(member.session, message))
    return told


def committed(
    track: FragmentTrack, opened: Round, items: Sequence[ContributionRecord], done: MergeFinished
) -> Committed:
    return Committed(
        fragment=track.index,
        version=track.version,
        round=opened.number,
        contributors=[item.id.learner for item in items],
        tokens=sum(item.tokens for item in items),
        steps=[item.steps for item in items],
        weights=[weight / (sum(track.weights) or 1.0) for weight in track.weights],
        merge_ns=done.merge_ns,
        update_bytes=done.update_bytes,
        gradient_norm=done.gradient_norm,
        rho=done.rho,
        checksum=done.checksum,
        store_ns=done.store_ns,
        store_bytes=done.store_bytes,
        share=track.share,
    )
