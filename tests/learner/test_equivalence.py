"""Through the real wire, with real processes: what the synchronous settings compute is what the textbooks say."""

from __future__ import annotations

import pytest
import torch
from cluster import SyncerThread, last_json, small_model, spawn

from atoll.core.config import SyncConfig

STEPS = 50

LEARNER = """
import json, sys, torch, atoll
STEPS = int(sys.argv[4])
from cluster import small_model
torch.set_num_threads(1)
name, address, lr = sys.argv[1], sys.argv[2], float(sys.argv[3])
torch.manual_seed(100 + int(name))  # every process starts elsewhere: the run's seed decides
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
data = torch.Generator().manual_seed(int(name))
with atoll.Learner(model, optimizer, address=address, learner_id=name) as learner:
    start = [p.detach().flatten().tolist() for p in model.parameters()]
    for _ in range(STEPS):
        x = torch.randn(8, 32, generator=data)
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        learner.step(tokens=8)
    end = [p.detach().flatten().tolist() for p in model.parameters()]
print(json.dumps({"start": start, "end": end}))
"""


def run(config: SyncConfig, lr: float) -> list[dict[str, list[list[float]]]]:
    syncer = SyncerThread(config)
    try:
        processes = [
            spawn(LEARNER, str(index), syncer.address, str(lr), str(STEPS)) for index in range(config.learners_expected)
        ]
        results = [last_json(process) for process in processes]
        stats = syncer.check_ledger()
        assert stats["tokens_merged"] == stats["tokens_processed"] == config.learners_expected * STEPS * 8
        return results
    finally:
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


def test_quorum_all_and_a_sync_per_step_is_data_parallel() -> None:
    """Plain SGD inside, plain mean, outer lr 1, no momentum, fp32: gradient averaging, to 1e-6 over 50 steps."""
    config = SyncConfig(
        sync_every=1,
        fragments=1,
        overlap=0,
        quorum="all",
        learners_expected=2,
        grace_cap_steps=0.0,
        merge="mean",
        outer_lr=1.0,
        outer_momentum=0.0,
        codec_up="fp32",
        codec_down="fp32",
    )
    results = run(config, lr=0.05)
    assert results[0]["start"] == results[1]["start"]
    assert results[0]["end"] == results[1]["end"]
    model = load(results[0]["start"])
    generators = [torch.Generator().manual_seed(index) for index in range(2)]
    for _ in range(STEPS):
        both = [gradients(model, generator) for generator in generators]
        for parameter, *each in zip(model.parameters(), *both, strict=True):
            parameter.data -= 0.05 * torch.stack(each).mean(0)
    assert distance(model, results[0]["end"]) < 1e-6


@pytest.mark.parametrize("adopt", ["rebase", "overwrite"])
def test_synchronous_settings_are_diloco(adopt: str) -> None:
    """DiLoCo with Nesterov, H=10, two workers, against a short reference on the same data, to 1e-5."""
    every, outer_lr, momentum = 10, 0.7, 0.9
    config = SyncConfig(
        sync_every=every,
        fragments=1,
        overlap=0,
        quorum="all",
        learners_expected=2,
        grace_cap_steps=0.0,
        merge="mean",
        outer_lr=outer_lr,
        outer_momentum=momentum,
        codec_up="fp32",
        codec_down="fp32",
        adopt=adopt,
    )
    results = run(config, lr=0.05)
    # The reference: H local steps each, mean of (global - local), outer Nesterov, everybody restarts from global.
    outer = [p.detach().clone() for p in load(results[0]["start"]).parameters()]
    buffers = [torch.zeros_like(p) for p in outer]
    generators = [torch.Generator().manual_seed(index) for index in range(2)]
    for _ in range(STEPS // every):
        deltas = []
        for generator in generators:
            model = load([p.flatten().tolist() for p in outer])
            for _ in range(every):
                for parameter, gradient in zip(model.parameters(), gradients(model, generator), strict=True):
                    parameter.data -= 0.05 * gradient
            deltas.append([before - after.detach() for before, after in zip(outer, model.parameters(), strict=True)])
        for index, each in enumerate(zip(*deltas, strict=True)):
            gradient = torch.stack(each).mean(0)
            buffers[index] = momentum * buffers[index] + gradient
            outer[index] = outer[index] - outer_lr * (gradient + momentum * buffers[index])
    reference = load([p.flatten().tolist() for p in outer])
    assert distance(reference, results[0]["end"]) < 1e-5
    assert results[0]["end"] == results[1]["end"]
