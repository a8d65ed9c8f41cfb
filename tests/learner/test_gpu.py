"""The CUDA paths of the learner: pytest -m gpu, on a machine that has one."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cluster import SyncerThread, TrainingThread, small_model

from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.learner.parameters import into
from atoll.learner.torch_parameters import TorchParameters

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_snapshots_hold_the_values_of_their_step(dtype: torch.dtype) -> None:
    model = small_model(512).to("cuda", dtype)
    parameters = TorchParameters(model)
    layout = build_layout(parameters.specs, 3)
    parameters.lay_out(layout)
    taken = []
    for step in range(20):
        for parameter in model.parameters():
            parameter.data.fill_(step)
        taken.append([parameters.read(fragment.index) for fragment in layout.fragments])
    for step, snapshots in enumerate(taken):
        for fragment, snapshot in zip(layout.fragments, snapshots, strict=True):
            assert snapshot.values().sum() == step * fragment.parameters


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "mix:0.5"])
def test_a_run_on_the_gpu(adopt: str) -> None:
    config = SyncConfig(sync_every=4, fragments=4, quorum="50%", learners_expected=2, adopt=adopt)
    syncer = SyncerThread(config)
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i, model=small_model(4000).cuda()) for i in range(2)]

    def reached(shell: Any) -> bool:
        return all(track.version >= 8 for track in shell.machine.book.tracks)

    try:
        syncer.wait_for(reached, "eight versions of every fragment")
    finally:
        for learner in learners:
            learner.stop()
            assert learner.error is None
    syncer.wait_for(lambda shell: not shell.machine.book.in_flight, "rest")
    stats = syncer.check_ledger()
    assert adopt != "rebase" or stats["tokens_merged"] == stats["tokens_processed"]
    for learner in learners:
        vault, parameters = learner.learner._shell.vault, learner.learner._parameters
        assert vault is not None and vault.current[0] is not None
        theta = vault.current[0].theta
        parameters.write(0, parameters.stage(0, partial(into, theta)))
        assert np.array_equal(parameters.read(0).values(), theta)
    syncer.stop()
