"""The lab on a GPU: captured steps, a stream per learner, threads that encode and stage. pytest -m gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atoll.instruments.lab.payloads import AtOnce
from atoll.instruments.lab.run import Workshop, run
from atoll.instruments.lab.spec import LabResult, LabSpec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    words = ["the ", "sea ", "ring ", "island ", "lagoon ", "drift\n"]
    file = tmp_path_factory.mktemp("corpus") / "text.txt"
    file.write_text("".join(np.random.default_rng(1).choice(words, 50_000)))
    return str(file)


def go(text: str, workshop: Workshop, **changes: Any) -> LabResult:
    values = {
        "model": "nano",
        "corpus": text,
        "batch": 16,
        "seq": 32,
        "tokens": 60_000,
        "evals": 2,
        "eval_windows": 64,
    }
    return run(LabSpec(**{**values, "learners": 4, **changes}), keep=workshop)


@pytest.mark.parametrize(("adopt", "optimizer"), [("rebase", "muon"), ("overwrite", "adamw"), ("mix:0.5", "muon")])
def test_it_learns_what_it_learns_on_a_cpu(text: str, adopt: str, optimizer: str) -> None:
    there = go(text, Workshop("cuda"), sync={"adopt": adopt}, optimizer=optimizer)
    here = go(text, Workshop("cpu"), sync={"adopt": adopt}, optimizer=optimizer)
    assert there.tokens == here.tokens and there.facts["rounds"] == here.facts["rounds"]
    assert abs(there.loss / here.loss - 1) < 0.05  # bf16 there


def test_threads_change_no_number(text: str) -> None:
    """Two runs on a GPU may differ in the last bits of sums; the tokens, rounds and merges may not."""
    world = {"jitter": 0.4, "latency_ms": 300, "fault": [{"kind": "kill", "target": "learner-1", "at": "40%"}]}
    helped, alone = Workshop("cuda"), Workshop("cuda")
    alone.threads = AtOnce()
    first, second = (go(text, workshop, world=world) for workshop in (helped, alone))
    for name in ("rounds", "contributions_merged", "tokens_merged", "steps"):
        assert first.facts[name] == second.facts[name]
    assert abs(first.loss / second.loss - 1) < 0.02
