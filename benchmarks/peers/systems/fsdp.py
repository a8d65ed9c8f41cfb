"""Sharded data-parallel training over gloo: FSDP2."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from workload import Workload

work = Workload.from_arguments()
options = work.options
dist.init_process_group("gloo", init_method=f"tcp://{options.coordinator}", rank=options.rank, world_size=options.world)
mesh = init_device_mesh("cpu", (options.world,))
for block in work.model.blocks:
    fully_shard(block, mesh=mesh)
model = fully_shard(work.model, mesh=mesh)
work.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
for step in work.steps():
    loss = work.forward(model)
    loss.backward()
    work.optimizer.step()
    work.record(step, loss.item())
work.finish(model)
