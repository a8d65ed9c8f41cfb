"""hivemind's Optimizer with local updates: parameters are averaged every H steps of all, in the background.

At equal tokens its model is the mean of all workers' parameters: what the averaging that would come next gives.
"""

import logging  # bench
import os
import sys
import time

import hivemind
import torch
from workload import Workload

if sys.argv[1:2] == ["coordinator"]:
    host, port = sys.argv[2].split(":")
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{host}/tcp/{port}"], start=True)
    print(dht.get_visible_maddrs()[0], flush=True)
    while True:
        time.sleep(60)

work = Workload.from_arguments()
options = work.options
peers = (options.folder / "coordinator.txt").read_text().split()
dht = hivemind.DHT(host_maddrs=[f"/ip4/{work.host}/tcp/0"], initial_peers=peers, start=True)
optimizer = hivemind.Optimizer(
    dht=dht,
    run_id="bakeoff",
    optimizer=work.optimizer,
    batch_size_per_step=options.batch,
    target_batch_size=options.batch * options.period * options.world,
    use_local_updates=True,
    matchmaking_time=1.0,
    averaging_timeout=5.0,
    delay_state_averaging=True,
    averager_opts={"request_timeout": 0.5},
)
optimizer.load_state_from_peers() if (options.folder / "running").exists() else None
kept = epoch = 0  # bench
averaged = []  # bench
watch = logging.Handler()  # bench
watch.emit = lambda record: averaged.append(1) if record.msg.startswith("Averaged parameters") else None  # bench
logger = logging.getLogger("hivemind.optim.state_averager")  # bench
logger.setLevel(logging.DEBUG)  # bench
logger.propagate = False  # bench
logger.addHandler(watch)  # bench
for step in work.steps():
    loss = work.forward()
    loss.backward()
    optimizer.step()
    if optimizer.local_epoch > epoch:  # bench
        kept, epoch = step + 1, optimizer.local_epoch  # bench
    work.record(step, loss.item(), kept=kept, lost=0, averaged=len(averaged))  # bench


def mean_of_all():  # bench
    torch.save(work.model.state_dict(), options.folder / f"model-{options.rank}.new")  # bench
    (options.folder / f"model-{options.rank}.new").rename(options.folder / f"model-{options.rank}.pt")  # bench
    files = [options.folder / f"model-{rank}.pt" for rank in range(options.world)]  # bench
    while not all(file.exists() for file in files):  # bench
        time.sleep(0.1)  # bench
    models = [torch.load(file) for file in files]  # bench
    work.model.load_state_dict({k: torch.stack([m[k] for m in models]).mean(0) for k in models[0]})  # bench


mean_of_all()  # bench
work.finish()
os._exit(0)
