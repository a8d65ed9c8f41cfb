"""What each rank of a storm's islands runs: a small model, sharded by FSDP2, until the run is over."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import atoll


def main() -> None:
    step_s, tokens = float(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 300), nn.Tanh(), nn.Linear(300, 32))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with atoll.Learner(model, optimizer, island_timeout_s=60.0, checkpoint_every_s=2.0) as learner:
        generator = torch.Generator().manual_seed(2 * learner.rank + learner.island_rank)
        while not learner.done:
            x = torch.randn(8, 32, generator=generator)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=tokens, loss=loss)
            time.sleep(step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
