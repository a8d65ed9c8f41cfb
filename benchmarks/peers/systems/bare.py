"""No system at all: each worker alone. What the others are measured against."""

from workload import Workload

work = Workload.from_arguments()
for step in work.steps():
    loss = work.forward()
    loss.backward()
    work.optimizer.step()
    work.record(step, loss.item())
work.finish()
