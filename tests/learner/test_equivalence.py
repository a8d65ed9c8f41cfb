"""Through the real wire, with real processes: what the synchronous settings compute is what the textbooks say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from cluster import SyncerThread, last_json, small_model, spawn

from atoll.core.config import SyncConfig

STEPS = 50

LR = 0.05
LEARNERS = 2

LEARNER = """
import json, sys, torch, atoll
from cluster import small_model
torch.set_num_threads(1)
name, lr, steps, addresses = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
torch.manual_seed(100 + int(name))  # every process starts elsewhere: the run's seed decides
found = []
for address in addresses:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = torch.Generator().manual_seed(int(name))
    with atoll.Learner(model, optimizer, address=address, learner_id=name) as learner:
        start = [p.detach().flatten().tolist() for p in model.parameters()]
        for _ in range(steps):
            x = torch.randn(8, 32, generator=data)
            loss = (model(x) - x.roll(1, 1)).square().mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            learner.step(tokens=8)
        end = [p.detach().flatten().tolist() for p in model.parameters()]
    found.append({"start": start, "end": end})
print(json.dumps(found))
"""

SYNCHRONOUS = SyncConfig(
    sync_every=10,
    fragments=1,
    overlap=0,
    quorum="all",
    learners_expected=LEARNERS,
    grace_cap_steps=0.0,
    merge="mean",
    outer_lr=0.7,
    outer_momentum=0.9,
    codec_up="fp32",
    codec_down="fp32",
    adopt="rebase",
)
RUNS = {
    "rebase": SYNCHRONOUS,
    "overwrite": replace(SYNCHRONOUS, adopt="overwrite"),
    "data-parallel": replace(SYNCHRONOUS, sync_every=1, outer_lr=1.0, outer_momentum=0.0),
}

Found = dict[str, list[list[float]]]
"""The parameters at the start and at the end of one learner."""


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, list[Found]]]:
    """Of each run, what its learners found: two processes take part in one after the other."""
    syncers = {name: SyncerThread(config) for name, config in RUNS.items()}
    try:
        addresses = [syncer.address for syncer in syncers.values()]
        processes = [spawn(LEARNER, str(index), str(LR), str(STEPS), *addresses) for index in range(LEARNERS)]
        each = [last_json(process) for process in processes]
        for syncer in syncers.values():
            stats = syncer.check_ledger()
            assert stats["tokens_merged"] == stats["tokens_processed"] == LEARNERS * STEPS * 8
        yield dict(zip(RUNS, map(list, zip(*each, strict=True)), strict=True))
    finally:
        for syncer in syncers.values():
            syncer.stop()


def load(values: list[list[float]]) -> torch.nn.Module:
    model = small_model()
    for parameter, value in zip(model.parameters(), values, strict=True):
        parameter.data = torch.tensor(value).reshape(parameter.shape)
    return model


def gradients(model: torch.nn.Module, generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(8, 32, generator=generator)
    loss = (model(x) - x.roll(1, 1)).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def distance(model: torch.nn.Module, values: list[list[float]]) -> float:
    pairs = zip(model.parameters(), values, strict=True)
    return max((p.detach().flatten() - torch.tensor(v)).abs().max().item() for p, v in pairs)


def test_quorum_all_and_a_sync_per_step_is_data_parallel(results: dict[str, list[Found]]) -> None:
    """Plain SGD inside, plain mean, outer lr 1, no momentum, fp32: gradient averaging, to 1e-6 over 50 steps."""
    first, second = results["data-parallel"]
    assert first["start"] == second["start"]
    assert first["end"] == second["end"]
    model = load(first["start"])
    generators = [torch.Generator().manual_seed(index) for index in range(2)]
    for _ in range(STEPS):
        both = [gradients(model, generator) for generator in generators]
        for parameter, *each in zip(model.parameters(), *both, strict=True):
            parameter.data -= LR * torch.stack(each).mean(0)
    assert distance(model, first["end"]) < 1e-6


@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_synchronous_settings_are_diloco(adopt: str, results: dict[str, list[Found]]) -> None:
    """DiLoCo with Nesterov, H=10, two workers, against a short reference on the same data, to 1e-5."""
    config = RUNS[adopt]
    every, outer_lr, momentum = config.sync_every, config.outer_lr, config.outer_momentum
    first, second = results[adopt]
    # The reference: H local steps each, mean of (global - local), outer Nesterov, everybody restarts from global.
    outer = [p.detach().clone() for p in load(first["start"]).parameters()]
    buffers = [torch.zeros_like(p) for p in outer]
    generators = [torch.Generator().manual_seed(index) for index in range(2)]
    for _ in range(STEPS // every):
        deltas = []
        for generator in generators:
            model = load([p.flatten().tolist() for p in outer])
            for _ in range(every):
                for parameter, gradient in zip(model.parameters(), gradients(model, generator), strict=True):
                    parameter.data -= LR * gradient
            deltas.append([before - after.detach() for before, after in zip(outer, model.parameters(), strict=True)])
        for index, each in enumerate(zip(*deltas, strict=True)):
            gradient = torch.stack(each).mean(0)
            buffers[index] = momentum * buffers[index] + gradient
            outer[index] = outer[index] - outer_lr * (gradient + momentum * buffers[index])
    reference = load([p.flatten().tolist() for p in outer])
    assert distance(reference, first["end"]) < 1e-5
    assert first["end"] == second["end"]
