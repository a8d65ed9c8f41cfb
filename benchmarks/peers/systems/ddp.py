"""Data-parallel training over gloo: DistributedDataParallel."""

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import Workload

work = Workload.from_arguments()
options = work.options
dist.init_process_group("gloo", init_method=f"tcp://{options.coordinator}", rank=options.rank, world_size=options.world)
model = DistributedDataParallel(work.model)
for step in work.steps():
    loss = work.forward(model)
    loss.backward()
    work.optimizer.step()
    work.record(step, loss.item())
work.finish()
