"""What it is worth to begin a low-rank contribution with the factors of the one before (`LowRank.warmed`).

    python benchmarks/lowrank_start.py                       matrices that change little from round to round
    python benchmarks/lowrank_start.py --loss --processes 8  runs of the lab, as in studies/warmup-cpu.toml

"Cold" is how updates are encoded, and how contributions were: from fixed random signs, with two iterations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from atoll.codec import Codec, get_codec, lowrank
from atoll.codec.fragments import Matrix
from atoll.learner import vault

SIDE, ROUNDS, RANK = 256, 40, "lowrank:4"
VARIANTS = {"cold, 1": (False, 1), "cold, 2": (False, 2), "warm, 1": (True, 1), "warm, 2": (True, 2)}
"""Warm or not, and iterations."""
SPECTRA = {
    "six strong directions and noise": np.r_[np.full(6, 5.0), np.full(SIDE - 6, 0.3)],
    "singular values k^-0.7": np.arange(1, SIDE + 1) ** -0.7,
    "singular values k^-0.3": np.arange(1, SIDE + 1) ** -0.3,
    "all alike, as Muon makes them": np.ones(SIDE),
}


def missing(values: Any, drift: float, *, warm: bool) -> float:
    """Of the sum of all contributions, what has not arrived after ROUNDS of them, with error feedback."""
    dice = np.random.default_rng(1)
    left, right = (np.linalg.qr(dice.standard_normal((SIDE, SIDE)))[0] for _ in range(2))
    steady = (left * values) @ right
    steady /= np.linalg.norm(steady)
    codec = get_codec(RANK).shaped((Matrix(0, SIDE, SIDE),))  # type: ignore[attr-defined]
    residual, last, total = None, None, np.zeros(SIDE * SIDE)
    arrived = np.zeros(SIDE * SIDE, np.float32)
    for _ in range(ROUNDS):
        x = (steady + drift * dice.standard_normal((SIDE, SIDE)) / SIDE).astype(np.float32).ravel()
        begun = codec.warmed(last) if warm and last is not None else codec
        last, residual = begun.encode_delta(x, None, residual)
        codec.decode_add(last, arrived)
        total += x
    return float(np.linalg.norm(total - arrived) / np.linalg.norm(total))


def print_missing() -> None:
    print("| matrix | drift |", " | ".join(VARIANTS), "|")
    for name, values in SPECTRA.items():
        for drift in (0.3, 1.0):
            cells = []
            for warm, lowrank.ITERATIONS in VARIANTS.values():
                cells.append(f"{missing(values, drift, warm=warm):.3f}")
            print(f"| {name} | {drift} |", " | ".join(cells), "|", flush=True)


def loss_of(job: tuple[str, str, int]) -> dict[str, Any]:
    """One run of the lab; "int4" besides the variants."""
    import torch

    from atoll.instruments.lab import load_study, run

    variant, optimizer, seed = job
    torch.set_num_threads(1)
    study = load_study(Path(__file__).parents[1] / "studies" / "warmup-cpu.toml")
    label = "int4" if variant == "int4" else "lowrank:4 up"
    spec = next(one.spec for one in study.planned if one.label == label)
    warm, lowrank.ITERATIONS = VARIANTS.get(variant, (False, 2))
    if not warm:
        vault.Vault._begun = _cold  # type: ignore[method-assign]
    result = run(replace(spec, optimizer=optimizer, seed=seed), device="cpu")
    return {"variant": variant, "optimizer": optimizer, "seed": seed, "loss": result.loss, "wall_s": result.wall_s}


def _cold(self: vault.Vault, name: str, fragment: int) -> Codec:
    return self.codec(name, fragment)


def print_losses(processes: int, out: Path) -> None:
    jobs = [(v, o, seed) for seed in range(3) for o in ("adamw", "muon") for v in ("int4", *VARIANTS) if v != "cold, 1"]
    found: dict[tuple[str, str], list[float]] = {}
    with multiprocessing.get_context("spawn").Pool(processes, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(loss_of, jobs):
            found.setdefault((row["optimizer"], row["variant"]), []).append(row["loss"])
            with out.open("a") as lines:
                lines.write(json.dumps(row) + "\n")
    for (optimizer, variant), losses in sorted(found.items()):
        error = stdev(losses) / len(losses) ** 0.5 if len(losses) > 1 else float("nan")
        print(f"{optimizer:6} {variant:8} {fmean(losses):.4f} ± {error:.4f} ({len(losses)})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("lowrank.jsonl"), help="one line for each run is appended")
    options = parser.parse_args()
    if options.loss:
        print_losses(options.processes, options.out)
    else:
        print_missing()
