"""torchft's DiLoCo (`--form streaming`: in fragments, applied later; `--form retries`: its quorum is asked again).

Settings are those of its own example: outer SGD 0.7 with Nesterov momentum 0.9, `use_async_quorum=False`. `init_sync`
is on: a replica that comes back gets a peer's state.
"""

import datetime
import os
import sys
import time

import torch
from torch.distributed import TCPStore
from workload import Workload

if sys.argv[1:2] == ["coordinator"]:
    from torchft.coordination import LighthouseServer

    host, replicas = sys.argv[2], int(sys.argv[3])
    server = LighthouseServer(
        bind=host, min_replicas=replicas, join_timeout_ms=1000, quorum_tick_ms=100, heartbeat_timeout_ms=5000
    )
    print(server.address(), flush=True)
    while True:
        time.sleep(60)

work = Workload.from_arguments()
options = work.options
if options.form == "retries":
    os.environ["TORCHFT_QUORUM_RETRIES"] = "20"

from torchft import Manager, ProcessGroupGloo  # noqa: E402
from torchft.local_sgd import DiLoCo  # noqa: E402

store = TCPStore(work.host, 0, is_master=True, wait_for_workers=False)
seconds = datetime.timedelta(seconds=60)


def outer(parameters):
    momentum = work.outer_momentum
    return torch.optim.SGD(parameters, lr=work.outer_lr, momentum=momentum, nesterov=momentum > 0)


state = {}


def load_state(saved):
    work.model.load_state_dict(saved["model"])
    work.optimizer.load_state_dict(saved["optimizer"])
    for optimizer, one in zip(state["outer"], saved["outer"], strict=True):
        optimizer.load_state_dict(one)


def save_state():
    outers = [optimizer.state_dict() for optimizer in state["outer"]]
    return {"model": work.model.state_dict(), "optimizer": work.optimizer.state_dict(), "outer": outers}


manager = Manager(
    pg=ProcessGroupGloo(timeout=seconds),
    load_state_dict=load_state,
    state_dict=save_state,
    min_replica_size=2,
    use_async_quorum=False,
    timeout=seconds,
    quorum_timeout=seconds,
    connect_timeout=seconds,
    rank=0,
    world_size=1,
    store_addr=work.host,
    store_port=store.port,
    lighthouse_addr=f"http://{options.coordinator}",
    replica_id=f"worker-{options.rank}",
    hostname=work.host,
)
streaming = options.form == "streaming"
fragments = list(work.model.blocks) if streaming else [work.model]
if streaming:  # what is in no block is a fragment of its own
    rest = torch.nn.ModuleList([work.model.embed, work.model.place, work.model.norm, work.model.head])
    fragments.append(rest)
state["outer"] = [outer(fragment.parameters()) for fragment in fragments]
period = max(options.period, len(fragments)) // len(fragments) * len(fragments)
diloco = DiLoCo(
    manager,
    fragments,
    work.optimizer,
    state["outer"] if streaming else state["outer"][0],
    sync_every=period,
    use_bucketization=True,
    pin_memory=False,
    fragment_sync_delay=1 if streaming else 0,
)
kept = lost = 0  # bench
exchange = period // len(fragments)  # bench
with diloco:
    for step in work.steps():
        loss = work.forward()
        loss.backward()
        before = manager.current_step()  # bench
        work.optimizer.step()
        if (step + 1) % exchange == 0:  # bench
            committed = manager.current_step() > before and manager.is_participating()  # bench
            kept, lost = (kept + exchange, lost) if committed else (kept, lost + exchange)  # bench
        work.record(step, loss.item(), kept=kept, lost=lost)  # bench
work.finish()
manager.shutdown(wait=False)
os._exit(0)
