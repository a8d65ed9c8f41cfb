"""Data-parallel training over gloo: DistributedDataParallel, or FSDP2 with `--form fsdp`."""

import datetime

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import Workload

work = Workload.from_arguments()
options = work.options
dist.init_process_group(  # +
    "gloo",
    init_method=f"tcp://{options.coordinator}",
    rank=options.rank,
    world_size=options.world,
    timeout=datetime.timedelta(seconds=120),
)
if options.form == "fsdp":
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (options.world,))
    for block in work.model.blocks:
        fully_shard(block, mesh=mesh)  # +
    model = fully_shard(work.model, mesh=mesh)  # +
    work.optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
else:
    model = DistributedDataParallel(work.model)  # +
for step in work.steps():
    loss = work.forward(model)
    loss.backward()
    work.optimizer.step()
    work.record(step, loss.item())
work.finish(model)
