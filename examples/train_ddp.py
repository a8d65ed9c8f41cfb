"""DistributedDataParallel inside of each learner, Atoll between the learners.

    atoll run --learners 2 --ranks 2 -- python examples/train_ddp.py --steps 100

Every rank makes the Learner and calls it in the same way. The ranks of one learner share each batch; learners exchange
what they learned every few dozen steps. On GPUs: init_process_group("nccl"), and the model on cuda:LOCAL_RANK.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_plain import NextByte, load_bytes, windows

import atoll


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=64, help="windows per rank and step")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    data = load_bytes()
    train, held_out = data[: -len(data) // 10], data[-len(data) // 10 :]
    torch.manual_seed(0)
    model = DistributedDataParallel(NextByte())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    with atoll.Learner(model, optimizer) as learner:
        reader = learner.rank * learner.island_size + learner.island_rank  # every rank reads data of its own
        generator = torch.Generator().manual_seed(1 + reader)
        for _ in range(options.steps):
            context, target = windows(train, options.batch, generator)
            loss = nn.functional.cross_entropy(model(context), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=target.numel(), loss=loss)  # what this rank has read
            if learner.done:
                break
        context, target = windows(held_out, 4096, torch.Generator().manual_seed(0))
        with learner.global_params(), torch.no_grad():
            loss = nn.functional.cross_entropy(model(context), target)
        if learner.island_rank == 0:
            print(f"{learner.learner_id}: held-out loss {float(loss):.3f} nats of the published model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
