"""An FSDP2 island, a DDP island, one process and a JAX learner in one run: one Theta, one report."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import island_models
import numpy as np
import pytest
import xxhash
from cluster import WAIT_S, SyncerThread
from island_ranks import Ranks
from island_work import plain

jax = pytest.importorskip("jax", reason="pip install 'atoll[jax]'")
optax = pytest.importorskip("optax")

import atoll.jax  # noqa: E402
from atoll.core import SyncConfig  # noqa: E402
from atoll.jax import Transposed  # noqa: E402
from atoll.learner import Learner  # noqa: E402
from atoll.observe import summarize  # noqa: E402

NAMES = {
    "up.kernel": Transposed("0.weight"),
    "up.bias": "0.bias",
    "down.kernel": Transposed("2.weight"),
    "down.bias": "2.bias",
}
STEPS, KINDS = 16, ("fsdp", "ddp", "single", "jax")


def single(address: str, folder: Path, told: dict[str, Any]) -> None:
    net = plain()
    with Learner(net, address=address, learner_id="single", run_folder=folder) as learner:
        for step in range(STEPS):
            island_models.nudge(net, step)
            learner.step(tokens=8, loss=0.5)
        published = {name: value.numpy() for name, value in learner.published_state_dict().items()}
        told["single"] = {"versions": learner.versions(), "parts": published}


def in_jax(address: str, folder: Path, told: dict[str, Any]) -> None:
    weights = {name: jax.numpy.asarray(p.detach().numpy()) for name, p in plain().named_parameters()}
    tree = {
        "up": {"kernel": weights["0.weight"].T, "bias": weights["0.bias"]},
        "down": {"kernel": weights["2.weight"].T, "bias": weights["2.bias"]},
    }
    state = optax.sgd(0.1).init(tree)
    with atoll.jax.Learner(tree, state, names=NAMES, address=address, learner_id="jax", run_folder=folder) as learner:
        params = learner.params
        for _ in range(STEPS):
            params = jax.tree.map(lambda value: value * 0.99, params)
            params = learner.step(params, state, tokens=8, loss=0.5)
        tree = learner.published()
        told["jax"] = {"versions": learner.versions(), "parts": {**_torch_names(tree)}}


def _torch_names(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    pairs = (("0", "up"), ("2", "down"))
    found = {f"{number}.weight": np.asarray(tree[layer]["kernel"]).T for number, layer in pairs}
    return found | {f"{number}.bias": np.asarray(tree[layer]["bias"]) for number, layer in pairs}


def checksum(parts: dict[str, np.ndarray[Any, Any]]) -> str:
    digest = xxhash.xxh3_64()
    for name in sorted(parts):
        digest.update(np.ascontiguousarray(parts[name], np.float32).tobytes())
    return digest.hexdigest()


def test_all_kinds_of_learners_train_one_model_in_one_run(tmp_path: Path) -> None:
    settings = {"sync_every": 4, "fragments": 4, "overlap": 0, "quorum": "all", "learners_expected": 4}
    syncer = SyncerThread(SyncConfig.from_dict(settings), folder=tmp_path)
    told: dict[str, Any] = {}
    try:
        islands = {
            kind: Ranks(2, tmp_path / kind, island_models.whole_parts, kind, syncer.address, STEPS, tmp_path)
            for kind in ("fsdp", "ddp")
        }
        work = [
            threading.Thread(target=one, args=(syncer.address, tmp_path, told), daemon=True) for one in (single, in_jax)
        ]
        for thread in work:
            thread.start()
        answers = {kind: ranks.results() for kind, ranks in islands.items()}
        for thread in work:
            thread.join(2 * WAIT_S)
        assert set(told) == {"single", "jax"}, "both threads have ended well"
        for kind, ranks in answers.items():
            assert all(isinstance(one, dict) and one["handed_over"] and one["kept"] for one in ranks), (kind, ranks)
            assert ranks[0]["versions"] == ranks[1]["versions"]
        parts = {name: [one["parts"][name] for one in answers["fsdp"]] for name in answers["fsdp"][0]["parts"]}
        theta = {
            "fsdp": checksum({name: np.concatenate(both) for name, both in parts.items()}),
            **{f"ddp rank {rank}": checksum(one["parts"]) for rank, one in enumerate(answers["ddp"])},
            **{kind: checksum(one["parts"]) for kind, one in told.items()},
        }
        versions = [one[0]["versions"] for one in answers.values()] + [one["versions"] for one in told.values()]
        assert len(set(versions)) == 1 and min(versions[0]) >= 3, versions
        assert len(set(theta.values())) == 1, theta
        assert checksum({name: p.detach().numpy() for name, p in plain().named_parameters()}) not in theta.values()
        merged = syncer.ask(lambda shell: {n: all(m.merged) for n, m in shell.machine.membership.members.items()})
        assert merged == dict.fromkeys(KINDS, True), "every fragment has contributions of all four"
        stats = syncer.check_ledger()
        assert stats["tokens_processed"] == stats["tokens_merged"] == 4 * STEPS * 8
    finally:
        syncer.stop()
    state = summarize(tmp_path)
    assert set(state.learners) == set(KINDS), "one report has all of them"
