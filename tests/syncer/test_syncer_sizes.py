"""How many bytes a push may have: a codec's bound before they come, and its own word once they are there."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import xxhash
from cluster import WAIT_S, SyncerThread, TrainingThread

from atoll.core.config import SyncConfig
from atoll.core.messages import InlinePush, PushHeader, PushKind, PushReply, Refusal
from atoll.errors import RefusedError
from atoll.syncer.shell import SyncerShell


def header_of(shell: SyncerShell, size: int) -> PushHeader:
    """Of a contribution that nobody has sent yet."""
    version, member = shell.machine.book.tracks[0].version, shell.machine.membership.members["only"]
    checksum = xxhash.xxh3_64_intdigest(bytes(size))
    counts = (0, 0, 0, 10**6, version, 1, 1, "int4", size, checksum, member.secret)
    return PushHeader(PushKind.CONTRIBUTION, "only", member.generation, *counts)


async def push(shell: SyncerShell, size: int) -> PushReply:
    """Over bulk, as the wire asks for it."""
    header = header_of(shell, size)
    if size > await shell.push_begin(header):
        return PushReply(False, Refusal.SIZE, "refused before it came")
    return await shell.push_complete(header, np.zeros(size, np.uint8))


def take_inline(shell: SyncerShell, size: int) -> PushReply:
    """On the learner's own session."""
    session = shell.machine.membership.members["only"].session
    return shell._take_inline(session, InlinePush(header_of(shell, size), bytes(size)))


def test_a_contribution_of_another_size_is_refused_on_both_ways() -> None:
    syncer = SyncerThread(SyncConfig(fragments=2, sync_every=1000))
    learner = TrainingThread(syncer.address, "only", steps=5)
    learner.wait_steps(3)
    shell = syncer.shell
    assert shell.state is not None
    size = shell.state.contribution_size_max(0)
    for wrong in (0, size - 132, size - 1, size + 1):
        reply = asyncio.run_coroutine_threadsafe(push(shell, wrong), syncer.loop).result(WAIT_S)
        inline = syncer.ask(lambda shell, wrong=wrong: take_inline(shell, wrong))
        assert (reply.code, inline.code) == (Refusal.SIZE, Refusal.SIZE)
    assert "only" in shell.machine.membership.members, "whoever sends nonsense may send again"
    learner.stop()
    syncer.stop()
    assert learner.error is None


def test_whole_parameters_have_one_size() -> None:
    syncer = SyncerThread(SyncConfig(fragments=2))
    learner = TrainingThread(syncer.address, "only", steps=2)
    learner.thread.join(WAIT_S)
    shell = syncer.shell
    assert shell.state is not None

    def opened(shell: SyncerShell) -> int:
        shell.driver.open_push = lambda header: PushReply(True)  # type: ignore[method-assign]
        return shell._size_max(replace(header_of(shell, 4), kind=PushKind.SEED))

    with pytest.raises(RefusedError, match="send all"):
        syncer.ask(opened)
    syncer.stop()
