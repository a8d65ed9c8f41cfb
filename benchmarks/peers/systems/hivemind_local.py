"""hivemind's Optimizer with local updates: parameters are averaged every H steps of all, in the background."""

import os
import sys
import time

import hivemind
from workload import Workload

if sys.argv[1:2] == ["coordinator"]:  # +
    host, port = sys.argv[2].split(":")
    dht = hivemind.DHT(host_maddrs=[f"/ip4/{host}/tcp/{port}"], start=True)
    print(dht.get_visible_maddrs()[0], flush=True)
    while True:
        time.sleep(60)

work = Workload.from_arguments()
options = work.options
peers = (options.folder / "coordinator.txt").read_text().split()
dht = hivemind.DHT(host_maddrs=[f"/ip4/{work.host}/tcp/0"], initial_peers=peers, start=True)  # +
optimizer = hivemind.Optimizer(  # +
    dht=dht,
    run_id="bakeoff",
    optimizer=work.optimizer,
    batch_size_per_step=options.batch,
    target_batch_size=options.batch * options.period * options.world,
    use_local_updates=True,
    matchmaking_time=1.0,
    averaging_timeout=15.0,
    delay_state_averaging=True,
)
optimizer.load_state_from_peers() if (options.folder / "running").exists() else None  # +
for step in work.steps():
    loss = work.forward()
    loss.backward()
    optimizer.step()  # +
    work.record(step, loss.item())
work.finish()
os._exit(0)
