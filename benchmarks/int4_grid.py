"""Which int4 grid loses least on real deltas? Trains a small byte GPT and measures every candidate on what it sends.

    python benchmarks/int4_grid.py [--rounds 4] [--width 128]

A delta is what a learner sends: the change of one tensor over H = 24 AdamW steps. Error is |x - dec(enc(x))|^2 / |x|^2.
Candidates differ in the grid and in how the scale of a block of 256 follows from its largest value p:

    power of two      0, +-p, +-p/2, ... +-p/64                           (E3M0)
    symmetric /7      -7 .. 7 times |p| / 7
    symmetric x0.9    the same with a scale 0.9 times as large: outliers are clipped, the rest is finer
    signed /8         -8 .. 7 times -p / 8: p gets the lowest code        (what Atoll ships)
    signed x0.9       the same, 0.9 times as large
    best of 16        signed, the best of 16 scales per block: the floor of what searching could give, too slow to ship
"""

from __future__ import annotations

import argparse
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from atoll.codec import get_codec

BLOCK = 256
Grid = Callable[[np.ndarray], np.ndarray]  # [blocks, 256] -> what arrives


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, c // 32, 32).permute(2, 0, 3, 1, 4)
        x = x + self.out(
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        )
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int, seq: int, layers: int = 3) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(seq, width)
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.tokens(x) + self.positions.weight[: x.shape[1]])))


def real_deltas(
    rounds: int, width: int, h: int = 24, batch: int = 8, seq: int = 128
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    torch.manual_seed(0)
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = Model(width, seq)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for number in range(rounds):
        base = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        for _ in range(h):
            starts = torch.randint(len(data) - seq - 1, (batch,))
            tokens = torch.stack([data[s : s + seq + 1] for s in starts.tolist()])
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"round {number + 1}: step {(number + 1) * h}, loss {loss.item():.3f}", flush=True)
        yield number, {name: (p.detach().numpy() - base[name]).ravel() for name, p in model.named_parameters()}


def blocks_of(x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)


def peaks(x: np.ndarray) -> np.ndarray:
    return np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)


def power_of_two(x: np.ndarray) -> np.ndarray:
    top = np.maximum(np.abs(peaks(x)), 1e-30)
    ratio = np.abs(x) / top
    exponent = np.clip(np.rint(np.log2(np.maximum(ratio, 1e-12))), -6, 0)
    # The nearest level in distance, not in exponent: compare with the neighbours, and with zero.
    levels = np.stack([2.0 ** np.clip(exponent + step, -6, 0) for step in (-1, 0, 1)] + [np.zeros_like(ratio)])
    best = np.take_along_axis(levels, np.abs(levels - ratio).argmin(0)[None], 0)[0]
    return np.sign(x) * best * top


def symmetric(shrink: float) -> Grid:
    def arrive(x: np.ndarray) -> np.ndarray:
        scale = np.maximum(np.abs(peaks(x)), 1e-30) * shrink / 7
        return np.clip(np.rint(x / scale), -7, 7) * scale

    return arrive


def signed(shrink: float) -> Grid:
    def arrive(x: np.ndarray) -> np.ndarray:
        scale = -peaks(x) * shrink / 8
        scale[scale == 0] = 1e-30
        return np.clip(np.rint(x / scale), -8, 7) * scale

    return arrive


def best_of_16(x: np.ndarray) -> np.ndarray:
    tries = np.stack([signed(shrink)(x) for shrink in np.linspace(0.55, 1.15, 16)])
    best = ((tries - x) ** 2).sum(2).argmin(0)
    return tries[best, np.arange(len(x))]


def shipped(x: np.ndarray) -> np.ndarray:
    codec, flat = get_codec("int4"), np.ascontiguousarray(x, np.float32).ravel()
    return codec.decode(codec.encode(flat), flat.size).reshape(x.shape)


GRIDS: dict[str, Grid] = {
    "power of two": power_of_two,
    "symmetric /7": symmetric(1.0),
    "symmetric x0.9": symmetric(0.9),
    "signed /8": signed(1.0),
    "signed x0.9": signed(0.9),
    "best of 16": best_of_16,
    "atoll int4": shipped,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    lost: dict[tuple[str, str], float] = {}
    sent: dict[str, float] = {}
    for number, deltas in real_deltas(arguments.rounds, arguments.width):
        for name, delta in deltas.items():
            kind = "embeddings, head" if name.split(".")[0] in ("tokens", "positions", "head") else "matrices"
            kind = kind if delta.size > 4 * arguments.width else "biases, norms"
            x = blocks_of(delta).astype(np.float64)
            for group in (kind, f"round {number + 1}", "all"):
                sent[group] = sent.get(group, 0.0) + float((x**2).sum())
            for grid, arrive in GRIDS.items():
                error = float(((arrive(x) - x) ** 2).sum())
                for group in (kind, f"round {number + 1}", "all"):
                    lost[group, grid] = lost.get((group, grid), 0.0) + error
    print("\nrelative squared error, in percent\n")
    print("| deltas | " + " | ".join(GRIDS) + " |")
    print("|---" * (len(GRIDS) + 1) + "|")
    for group in sorted(sent, key=lambda g: (g == "all", g.startswith("round"), g)):
        print(f"| {group} | " + " | ".join(f"{100 * lost[group, grid] / sent[group]:.3f}" for grid in GRIDS) + " |")


if __name__ == "__main__":
    main()
