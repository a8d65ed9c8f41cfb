"""One rank of an island, as a plain process with torch.distributed: reads its share, and says what it read.

python island_rank.py RANK SIZE PORT KIND WORKERS
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch.distributed as dist
from data_fakes import FakeRun, Numbers, Skippable

import atoll.data
from atoll.data import dry_wait, lease_client


def main() -> None:
    dry_wait.DRY_GRACE_S, dry_wait.LINGER_S_MAX, lease_client.ASK_AGAIN_S = 0.3, 0.2, 0.02
    rank, size, port = map(int, sys.argv[1:4])
    kind, workers = sys.argv[4], int(sys.argv[5])
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    learner = FakeRun().learner("a") if rank == 0 else SimpleNamespace(done=False)
    common = {"batch_size": 4, "chunk_size": 10, "epochs": 2, "num_workers": workers}
    if kind == "map":
        loader = atoll.data.loader(learner, Numbers(95), **common)
    else:
        loader = atoll.data.iterable(learner, Skippable(95), samples=95, **common)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        dist.barrier()  # as the collectives of a training step: a rank that has a batch more would hang here
        if rank == 0:
            learner.step()
    dist.barrier()
    status = learner.run.status() if rank == 0 else {}
    print(json.dumps({"batches": batches, "status": status}))


if __name__ == "__main__":
    main()
