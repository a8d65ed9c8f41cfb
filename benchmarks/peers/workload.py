"""The same work for every system: model, data, inner optimizer, pace and record. Needs torch and nothing else.

A worker of any system reads

    work = Workload.from_arguments()
    for step in work.steps(start):
        loss = work.forward(); loss.backward(); work.optimizer.step()
        ...what the system asks for...
        work.record(step, loss)

Each step takes at least `--step-ms` times this worker's factor: sleeping makes equal machines of unequal ones, so that
the systems are compared and not the noise of the cores. Lines of `record` go to FOLDER/worker-RANK.jsonl with the time
of CLOCK_MONOTONIC, which all processes of a machine share. A system whose steps can be lost says how many of this
process's are in the model (`kept`) and how many were thrown away (`lost`), or to which `round` a step belongs.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256
READY_S_MAX = 60.0
SHAPES = {"tiny": (2, 4, 128), "medium": (6, 6, 384), "large": (12, 12, 768)}
"""layers, heads, width: 0.46M, 10.8M and 85M parameters."""


class Block(nn.Module):
    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, shape: str, seq: int) -> None:
        super().__init__()
        layers, heads, width = SHAPES[shape]
        self.embed, self.place = nn.Embedding(VOCAB, width), nn.Embedding(seq, width)
        self.blocks = nn.Sequential(*(Block(heads, width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def corpus() -> tuple[torch.Tensor, torch.Tensor]:
    """The source of Python's standard library: a part to train on, and a part that nobody sees."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()
    return data[: -len(data) // 20], data[-len(data) // 20 :]


def held_out_loss(model: nn.Module, seq: int) -> float:
    _, data = corpus()
    device = next(model.parameters()).device
    windows = data[: len(data) // (seq + 1) * (seq + 1)].view(-1, seq + 1)[:256].to(device)
    with torch.no_grad():
        return float(F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten()))


@dataclass
class Workload:
    options: argparse.Namespace

    @staticmethod
    def parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--world", type=int, required=True)
        parser.add_argument("--hosts", required=True, help="the workers' addresses, by rank, with commas between")
        parser.add_argument("--coordinator", default="", help="HOST:PORT")
        parser.add_argument("--shape", choices=SHAPES, default="tiny")
        parser.add_argument("--batch", type=int, default=8)
        parser.add_argument("--seq", type=int, default=64)
        parser.add_argument("--device", default="cpu", help="cuda: several workers share one GPU")
        parser.add_argument("--lr", type=float, default=3e-3)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--steps", type=int, default=0, help="0: until it is killed")
        parser.add_argument("--step-ms", type=float, default=0.0)
        parser.add_argument("--factor", type=float, default=1.0, help="this worker is so many times slower")
        parser.add_argument("--jitter", type=float, default=0.0, help="standard deviation of a step's time, as a share")
        parser.add_argument("--period", type=int, default=8, help="H, where the system has one")
        parser.add_argument("--outer", default="", help="outer learning rate and momentum, where it has them")
        parser.add_argument("--form", default="", help="of the system, where it has several")
        return parser

    @classmethod
    def from_arguments(cls) -> Workload:
        return cls(cls.parser().parse_args())

    def __post_init__(self) -> None:
        options = self.options
        torch.set_num_threads(1)
        torch.manual_seed(options.seed)  # all start from the same parameters
        self.model = GPT(options.shape, options.seq).to(options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.host = options.hosts.split(",")[options.rank]
        self.outer_lr, self.outer_momentum = (float(part) for part in (options.outer or "1,0").split(","))
        self._data, _ = corpus()
        self._draw = torch.Generator().manual_seed(1000 * options.seed + options.rank + 1)
        self._pace = random.Random(options.rank)
        self._lines = (options.folder / f"worker-{options.rank}.jsonl").open("a", buffering=1)
        self._asked: Path | None = options.folder / "evaluate" if options.rank == 0 else None
        self._stopped = False
        self._next = 0.0
        if threading.current_thread() is threading.main_thread():  # NVIDIA FLARE runs scripts in a thread
            signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stopped = True

    @property
    def tokens(self) -> int:
        return int(self.options.batch * self.options.seq)

    def steps(self, start: int = 0) -> Iterator[int]:
        """Step numbers from `start`; each lasts as long as this worker's pace says."""
        if self.options.steps:
            self._wait_for_all()
        self._next = time.monotonic()
        step = start
        while not self._stopped and (not self.options.steps or step < self.options.steps):
            yield step
            step += 1

    def _wait_for_all(self) -> None:
        """Equal tokens are of learners that train at the same time: nobody begins before the last is there."""
        folder, deadline = self.options.folder, time.monotonic() + READY_S_MAX
        (folder / f"ready-{self.options.rank}").touch()
        while len(list(folder.glob("ready-*"))) < self.options.world and time.monotonic() < deadline:
            time.sleep(0.02)

    def forward(self, model: nn.Module | None = None) -> torch.Tensor:
        """The loss of one batch, and what it takes of the step's time."""
        self.optimizer.zero_grad()
        starts = torch.randint(len(self._data) - self.options.seq - 1, (self.options.batch,), generator=self._draw)
        window = self._data[starts[:, None] + torch.arange(self.options.seq + 1)].to(self.options.device)
        logits = (model or self.model)(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        self._wait()
        return loss

    def _wait(self) -> None:
        """The accelerator's time: before the optimizer's step, so that whoever synchronises waits for it, too."""
        seconds = self.options.step_ms / 1e3 * self.options.factor
        seconds *= max(0.1, 1 + self.options.jitter * self._pace.gauss(0, 1))
        self._next = max(self._next, time.monotonic() - seconds) + seconds
        pause = self._next - time.monotonic()
        if pause > 0:
            time.sleep(pause)

    def record(self, step: int, loss: float | torch.Tensor = math.nan, **fates: int | str) -> None:
        """A step was made; `fates` as above. Worker 0's model is looked at once, when it is asked for."""
        line = {"t": time.monotonic(), "step": step, "loss": round(float(loss), 4), "pid": os.getpid(), **fates}
        self._lines.write(json.dumps(line) + "\n")
        if self._asked is not None and self._asked.exists():
            self._asked = None
            self.finish()

    def finish(self, model: nn.Module | None = None) -> None:
        """The held-out loss of the model that this system would hand to a user."""
        loss = held_out_loss(model or self.model, self.options.seq)
        final = self.options.folder / f"final-{self.options.rank}.json"
        final.with_suffix(".new").write_text(json.dumps({"loss": loss}))
        final.with_suffix(".new").rename(final)
