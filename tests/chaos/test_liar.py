"""What a learner process says while it is told to lie, and that only such a process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cluster import SyncerProcess
from vaults import made

from atoll.core import DataReport, Hello, InlinePush, Nothing, Progress, PushHeader, PushKind
from atoll.instruments.chaos.liar import Liar
from atoll.instruments.chaos.lies import LIES, NUMBERS_EACH, TOLD_BY_PROCESSES, VALUES
from atoll.learner import Vault
from atoll.observe import events as ev
from atoll.observe import read_events

HELLO = Hello("one", "instance", 2, (), epoch=3)
PROGRESS = Progress(10, 4, 400, 1_000_000, 1.0, (0,))
HEADER = PushHeader(PushKind.CONTRIBUTION, "one", 1, 0, 5, 6, 7, 8, 4, 400, "int4", 2, 99)
INLINE = InlinePush(HEADER, b"xx")


def liar(folder: Path, **lies: float) -> Liar:
    path = folder / "lies"
    if lies:
        path.write_text(json.dumps(lies))
    return Liar(path, Vault.encode)


def test_without_its_file_nothing_is_changed(tmp_path: Path) -> None:
    for message in (HELLO, PROGRESS, HEADER, INLINE):
        assert list(liar(tmp_path).falsify(message)) == [message]
    (tmp_path / "lies").write_text("{half of a fi")
    assert list(liar(tmp_path).falsify(PROGRESS)) == [PROGRESS]


def test_claims_are_falsified_as_the_file_says(tmp_path: Path) -> None:
    lying = liar(tmp_path, epoch=1000, step=10**9, counters=7, tokens=50, steps=3)
    (hello,), (progress,), (header,) = (lying.falsify(message) for message in (HELLO, PROGRESS, HEADER))
    assert isinstance(hello, Hello) and hello.epoch == 1003 and hello.learner == "one"
    assert isinstance(progress, Progress)
    assert (progress.step, progress.steps, progress.tokens) == (
        10 + 10**9 + 24,
        28,
        2800,
    )  # as its 24 more steps would lead to
    assert isinstance(header, PushHeader) and (header.tokens, header.steps, header.seq) == (20_000, 12, HEADER.seq)


def test_a_silent_one_reports_and_answers_nothing(tmp_path: Path) -> None:
    lying = liar(tmp_path, silent=1)
    assert list(lying.falsify(PROGRESS)) == [PROGRESS]
    assert [list(lying.falsify(message)) for message in (HEADER, INLINE, Nothing(0, 0))] == [[], [], []]


def test_one_contribution_is_sent_under_many_numbers_and_chunks_are_claimed(tmp_path: Path) -> None:
    lying = liar(tmp_path, numbers=1, chunks=1)
    report = DataReport("train", 3, 100, 1, done=(99,), holding=(98,))
    numbers = [one.header.seq for one in lying.falsify(INLINE) if isinstance(one, InlinePush)]
    assert numbers[0] == HEADER.seq and len(set(numbers)) == 1 + NUMBERS_EACH
    (claimed,) = lying.falsify(report)
    assert isinstance(claimed, DataReport) and (claimed.stream, claimed.serial) == ("train", 3)
    assert len(claimed.done) > 1 and claimed.returned and claimed.holding == (98,)


@pytest.mark.parametrize("name", ["flipped", "scaled", "zero"])
def test_values_are_multiplied_and_nothing_is_owed(tmp_path: Path, name: str) -> None:
    vault, sending, delta = made("fp32")
    payload = liar(tmp_path, **{name: 1.0}).encode(vault, sending)
    np.testing.assert_allclose(payload.view(np.float32), VALUES[name] * delta, rtol=1e-6, atol=1e-6)
    assert sending.residual is None


def test_every_lie_of_a_process_has_a_meaning() -> None:
    assert set(TOLD_BY_PROCESSES) < set(LIES) and len(TOLD_BY_PROCESSES) == len(set(TOLD_BY_PROCESSES))


LEARNS = """
import sys, torch, atoll
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with atoll.Learner(model, optimizer, address=sys.argv[1], learner_id="liar") as learner:
    for _ in range(40):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        learner.step(tokens=8)
"""


@pytest.mark.parametrize("preload", ["", "atoll.instruments.chaos.inside"])
def test_a_real_learner_lies_to_a_real_syncer_only_if_it_was_made_to(tmp_path: Path, preload: str) -> None:
    (tmp_path / "lies").write_text(json.dumps({"zero": 1}))
    syncer = SyncerProcess(tmp_path, "--learners", "1", "--quorum", "1", "--sync-every", "4", "--overlap", "1")
    files = {"ATOLL_LIE_FILE": str(tmp_path / "lies"), "ATOLL_POISON_FILE": str(tmp_path / "none")}
    environment = {**os.environ, **files, "ATOLL_PRELOAD": preload, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", LEARNS, syncer.address], env=environment, check=True, timeout=120)
    syncer.stop()
    norms = [event.norm for _, _, event in read_events(tmp_path) if isinstance(event, ev.ContributionReceived)]
    assert norms and all((norm == 0) == bool(preload) for norm in norms)
