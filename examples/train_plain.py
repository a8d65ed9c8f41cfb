"""A plain PyTorch loop with Atoll in it: the three lines marked "Atoll" are all that was added.

    atoll run --learners 2 -- python examples/train_plain.py --steps 300

Each learner reads its own random windows of the Python standard library's source and learns to guess the next byte.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn

import atoll  # Atoll, line 1

CONTEXT = 16  # bytes that the model looks back


def load_bytes() -> torch.Tensor:
    files = sorted(Path(os.__file__).parent.glob("[a-d]*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


class NextByte(nn.Module):
    def __init__(self, width: int = 24, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.mlp = nn.Sequential(nn.Linear(CONTEXT * width, hidden), nn.GELU(), nn.Linear(hidden, 256))

    def forward(self, context: torch.Tensor) -> torch.Tensor:  # [batch, CONTEXT] -> logits [batch, 256]
        return self.mlp(self.embed(context).flatten(1))


def windows(data: torch.Tensor, batch: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (batch,), generator=generator)
    window = data[starts[:, None] + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    steps, data = parser.parse_args().steps, load_bytes()
    torch.manual_seed(0)
    model = NextByte()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with atoll.Learner(model, optimizer) as learner:  # Atoll, line 2
        generator = torch.Generator().manual_seed(1 + learner.rank)  # each learner reads data of its own
        for _ in range(steps):
            context, target = windows(data[: -len(data) // 10], 128, generator)
            loss = nn.functional.cross_entropy(model(context), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=target.numel(), loss=loss)  # Atoll, line 3
        context, target = windows(data[-len(data) // 10 :], 4096, torch.Generator().manual_seed(0))
        with torch.no_grad(), learner.global_params():  # evaluate the published model, not this learner's copy
            print(f"held-out loss {nn.functional.cross_entropy(model(context), target).item():.3f} nats per byte")
