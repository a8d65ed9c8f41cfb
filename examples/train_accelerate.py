"""accelerate's plain loop with Atoll: the three lines marked "Atoll" are all that was added.

atoll run --learners 2 -- python examples/train_accelerate.py --steps 100
"""

import argparse
import os
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

import atoll  # Atoll, line 1

CONTEXT = 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 5)

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, 128), nn.GELU(), nn.Linear(128, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)

    with atoll.Learner(model, optimizer, extras={"schedule": schedule}) as learner:  # Atoll, line 2
        generator = torch.Generator().manual_seed(1 + learner.rank)  # each learner reads data of its own
        tokens = 0
        while learner.step_count < options.steps and not learner.done:
            batch = windows[torch.randint(len(windows), (64,), generator=generator)].to(accelerator.device)
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            tokens += len(batch)
            if accelerator.sync_gradients:
                learner.step(tokens=tokens, loss=loss)  # Atoll, line 3: once per update, with all of its tokens
                tokens = 0
                if learner.step_count % 20 == 0:
                    print(f"step {learner.step_count:4d}  loss {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
