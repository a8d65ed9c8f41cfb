"""Flower: FedAvgM (or FedAdam, `--form adam`) on the server; a round is H local steps of every client.

The server keeps each round's parameters in a file and goes on from it, as its guide to checkpoints shows.
"""

import os
import sys
from pathlib import Path

import flwr
import numpy as np
import torch
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from workload import GPT, Workload, held_out_loss

if sys.argv[1:2] == ["coordinator"]:
    import json  # bench

    work = Workload.parser().parse_args(sys.argv[2:])
    torch.manual_seed(work.seed)
    model = GPT(work.shape, work.seq)
    adam = work.form == "adam"
    saved, merged_rounds = Path(work.folder, "server.npz"), Path(work.folder, "merged.txt")

    class Strategy(flwr.server.strategy.FedAdam if adam else flwr.server.strategy.FedAvgM):
        def aggregate_fit(self, round_number, results, failures):
            merged = super().aggregate_fit(round_number, results, failures)
            if merged[0] is not None:
                self.newest = parameters_to_ndarrays(merged[0])
                np.savez(saved.with_name("new.npz"), *self.newest)
                saved.with_name("new.npz").rename(saved)
                with merged_rounds.open("a") as out:  # bench
                    out.writelines(f"{result.metrics['round']}\n" for _, result in results)  # bench
            return merged

    arrays = [value.numpy() for value in model.state_dict().values()]
    if saved.exists():
        with np.load(saved) as file:
            arrays = [file[name] for name in file.files]
    common = {"fraction_evaluate": 0.0, "min_fit_clients": 2, "min_available_clients": 2}
    lr, momentum = (float(part) for part in (work.outer or "1,0").split(","))
    outer = {"eta": 1e-2, "tau": 1e-3} if adam else {"server_learning_rate": lr, "server_momentum": momentum}
    strategy = Strategy(initial_parameters=ndarrays_to_parameters(arrays), **common, **outer)
    rounds = work.steps // work.period if work.steps else 10**6
    flwr.server.start_server(
        server_address=work.coordinator, config=flwr.server.ServerConfig(num_rounds=rounds), strategy=strategy
    )
    arrays = (torch.from_numpy(array) for array in strategy.newest)
    model.load_state_dict(dict(zip(model.state_dict(), arrays, strict=True)))
    Path(work.folder, "final-0.json").write_text(json.dumps({"loss": held_out_loss(model, work.seq)}))  # bench
    sys.exit(0)

work = Workload.from_arguments()
taken, rounds = iter(range(10**9)), iter(range(10**9))


class Client(flwr.client.NumPyClient):
    def fit(self, parameters, config):
        named = zip(work.model.state_dict(), (torch.from_numpy(p) for p in parameters), strict=True)
        work.model.load_state_dict(dict(named))
        round_name = f"{os.getpid()}-{next(rounds)}"  # bench
        for _ in range(work.options.period):
            loss = work.forward()
            loss.backward()
            work.optimizer.step()
            work.record(next(taken), loss.item(), round=round_name)  # bench
        arrays = [value.numpy().copy() for value in work.model.state_dict().values()]
        return arrays, work.tokens * work.options.period, {"round": round_name}


next(work.steps())
flwr.client.start_client(server_address=work.options.coordinator, client=Client().to_client(), insecure=True)
