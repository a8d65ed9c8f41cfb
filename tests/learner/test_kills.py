"""A learner dies by SIGKILL at the worst moments: the run goes on, the ledger adds up, the next one is welcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cluster import WAIT_S, Proxy, SyncerThread, TrainingThread, small_model, spawn

from atoll.core.config import SyncConfig
from atoll.core.membership import MemberState

VICTIM = """
import sys, time, torch, atoll
from cluster import small_model
torch.set_num_threads(1)
model = small_model(4000)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer, address=sys.argv[1], learner_id="victim") as learner:
    while True:
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        learner.step(tokens=32)
        time.sleep(0.05)
"""


@pytest.fixture
def syncer() -> Iterator[SyncerThread]:
    config = SyncConfig(
        sync_every=8, fragments=4, quorum="1", learners_expected=2, codec_up="fp32", lost_after_ns=10**9
    )
    running = SyncerThread(config)
    yield running
    running.stop()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


def member_is(state: MemberState, generation: int = 1) -> Any:
    def check(shell: Any) -> bool:
        member = shell.machine.membership.members.get("victim")
        return member is not None and member.state is state and member.generation == generation

    return check


def commits(shell: Any) -> int:
    return int(shell.machine.book.commits)


@pytest.mark.parametrize("moment", ["push", "fetch", "step"])
def test_sigkill(moment: str, syncer: SyncerThread) -> None:
    healthy = TrainingThread(syncer.address, "healthy", model=small_model(4000), step_s=0.05)
    syncer.wait_for(lambda shell: commits(shell) >= 2, "two commits")
    # A fragment is about 260 kB as fp32, so over this link one push or one whole fetch takes more than a second.
    proxy = Proxy(syncer.address, bytes_per_s=200_000)
    victim = spawn(VICTIM, proxy.address)
    try:
        if moment == "fetch":
            syncer.wait_for(member_is(MemberState.JOINING), "the victim to join")
            before = proxy.moved["down"]
            wait_until(lambda: proxy.moved["down"] > before + 100_000, "part of a fetch")
            assert syncer.ask(member_is(MemberState.JOINING))
        else:
            syncer.wait_for(member_is(MemberState.ACTIVE), "the victim to be active")
            before = proxy.moved["up"]
            wanted = 100_000 if moment == "push" else 1
            wait_until(lambda: proxy.moved["up"] > before + wanted, "part of a push")
        victim.kill()
        syncer.wait_for(member_is(MemberState.LOST), "the loss to be noticed")
        taken, done = healthy.taken, syncer.ask(commits)
        syncer.wait_for(lambda shell: commits(shell) >= done + 6, "commits without the victim")
        assert healthy.taken > taken and healthy.error is None
        stats = syncer.check_ledger()
        assert set(stats["tokens_discarded"]) <= {"learner_lost"}
        victim = spawn(VICTIM, syncer.address)
        syncer.wait_for(member_is(MemberState.ACTIVE, generation=2), "its successor")

        def contributed(shell: Any) -> bool:
            return any(shell.machine.membership.members["victim"].merged)

        syncer.wait_for(contributed, "a merged contribution of its successor")
        syncer.check_ledger()
    finally:
        victim.kill()
        victim.wait(WAIT_S)
        healthy.stop()
        proxy.stop()
    assert healthy.error is None
