"""Which int2 grid loses least? Measures candidates on drawn values and on real deltas of a small byte GPT.

    python benchmarks/int2_grid.py [--rounds 4] [--width 128]

Error is |x - dec(enc(x))|^2 / |x|^2, per block of 256 with one scale. Candidates, with p the largest value of a block,
r the root mean square of what is not zero in it, and s the step between two levels:

    peak           -3/2 .. 3/2 steps, s = |p| / 1.5: int8's and int4's way of taking the scale from the largest value
    rms            the same levels, s = r
    odd            the same levels, s fitted: from r, two rounds of (nearest codes, least-squares step for them)
    even           -2 .. 1 steps (with a zero), sign of s opposite to p's, fitted as above
    ternary        -1, 0, 1 steps, fitted as above: the fourth code is not used
    odd, 1 fit     odd with one round
    search         odd, the best of 48 starting steps: the floor of what searching could give, too slow to ship
    atoll int2     what Atoll ships: even for blocks with a zero in them, odd for the others
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from int4_grid import blocks_of, peaks, real_deltas

from atoll.codec import get_codec

BLOCK = 256
DRAWN_BLOCKS = 400
ODD, EVEN, TERNARY = np.array([-1.5, -0.5, 0.5, 1.5]), np.array([-2.0, -1.0, 0.0, 1.0]), np.array([-1.0, 0.0, 1.0])
Grid = Callable[[np.ndarray], np.ndarray]  # [blocks, 256] -> what arrives


def nearest(x: np.ndarray, step: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return levels[np.abs(x[:, :, None] - step[:, None, None] * levels).argmin(2)]


def spread(x: np.ndarray) -> np.ndarray:
    return np.sqrt((x**2).sum(1) / np.maximum((x != 0).sum(1), 1)) + 1e-30


def with_step(x: np.ndarray, step: np.ndarray, levels: np.ndarray) -> np.ndarray:
    return step[:, None] * nearest(x, step, levels)


def fitted(levels: np.ndarray, fits: int, start: float = 1.0) -> Grid:
    def arrive(x: np.ndarray) -> np.ndarray:
        step = start * spread(x) * (-np.sign(peaks(x)[:, 0] + 1e-300) if levels is EVEN else 1.0)
        for _ in range(fits):
            chosen = nearest(x, step, levels)
            squares = (chosen**2).sum(1)
            step = np.where(squares > 0, (x * chosen).sum(1) / np.maximum(squares, 1e-30), step)
        return with_step(x, step, levels)

    return arrive


def searched(x: np.ndarray) -> np.ndarray:
    best, lowest = np.zeros_like(x), np.full(len(x), np.inf)
    for start in np.geomspace(0.25, 6.0, 48):
        tried = fitted(ODD, 1, start)(x)
        error = ((tried - x) ** 2).sum(1)
        best[error < lowest] = tried[error < lowest]
        lowest = np.minimum(lowest, error)
    return best


def shipped(x: np.ndarray) -> np.ndarray:
    codec, flat = get_codec("int2"), np.ascontiguousarray(x, np.float32).ravel()
    return codec.decode(codec.encode(flat), flat.size).reshape(x.shape)


GRIDS: dict[str, Grid] = {
    "peak": lambda x: with_step(x, np.abs(peaks(x)[:, 0]) / 1.5 + 1e-30, ODD),
    "rms": lambda x: with_step(x, spread(x), ODD),
    "odd": fitted(ODD, 2),
    "even": fitted(EVEN, 2),
    "ternary": fitted(TERNARY, 2, 1.22),
    "odd, 1 fit": fitted(ODD, 1),
    "search": searched,
    "atoll int2": shipped,
}


def drawn() -> dict[str, list[np.ndarray]]:
    dice = np.random.default_rng(0)
    shape = (DRAWN_BLOCKS, BLOCK)
    normal = dice.standard_normal(shape)
    padded, sparse = normal.copy(), normal * (dice.random(shape) < 0.1)
    padded[:, BLOCK // 2 :] = 0.0
    return {
        "normal": [normal],
        "Laplace": [dice.laplace(size=shape)],
        "uniform": [dice.uniform(-1, 1, shape)],
        "normal, half padding": [padded],
        "normal, 9 of 10 zero": [sparse],
    }


def real(rounds: int, width: int) -> dict[str, list[np.ndarray]]:
    groups: dict[str, list[np.ndarray]] = {}
    for number, deltas in real_deltas(rounds, width):
        for name, delta in deltas.items():
            kind = "embeddings, head" if name.split(".")[0] in ("tokens", "positions", "head") else "matrices"
            kind = kind if delta.size > 4 * width else "biases, norms"
            for group in (kind, f"round {number + 1}", "all"):
                groups.setdefault(group, []).append(blocks_of(delta).astype(np.float64))
    return dict(sorted(groups.items(), key=lambda item: (item[0] == "all", item[0].startswith("round"), item[0])))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    groups = {**drawn(), **real(arguments.rounds, arguments.width)}
    print("\nrelative squared error, in percent\n\n| values | " + " | ".join(GRIDS) + " |")
    print("|---" * (len(GRIDS) + 1) + "|")
    for group, parts in groups.items():
        sent = sum(float((x**2).sum()) for x in parts)
        lost = [sum(float(((arrive(x) - x) ** 2).sum()) for x in parts) for arrive in GRIDS.values()]
        print(f"| {group} | " + " | ".join(f"{100 * error / sent:.1f}" for error in lost) + " |")


if __name__ == "__main__":
    main()
