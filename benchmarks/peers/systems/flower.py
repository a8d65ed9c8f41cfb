"""Flower: FedAvgM on the server; a round is H local steps of every client."""

import sys

import torch
from workload import GPT, Workload, held_out_loss

if sys.argv[1:2] == ["coordinator"]:  # +
    import json
    from pathlib import Path

    import flwr
    from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays

    work = Workload.parser().parse_args(sys.argv[2:])
    torch.manual_seed(work.seed)
    model = GPT(work.shape, work.seq)
    lr, momentum = (float(part) for part in work.outer.split(","))

    class Strategy(flwr.server.strategy.FedAvgM):  # +
        def aggregate_fit(self, round_number, results, failures):
            merged = super().aggregate_fit(round_number, results, failures)
            if merged[0] is not None:
                self.newest = parameters_to_ndarrays(merged[0])
            return merged

    first = ndarrays_to_parameters([value.numpy() for value in model.state_dict().values()])
    strategy = Strategy(
        fraction_evaluate=0.0,
        min_fit_clients=2,
        min_available_clients=work.world,
        initial_parameters=first,
        server_learning_rate=lr,
        server_momentum=momentum,
    )
    rounds = work.steps // work.period if work.steps else 10**6
    flwr.server.start_server(
        server_address=work.coordinator, config=flwr.server.ServerConfig(num_rounds=rounds), strategy=strategy
    )
    arrays = (torch.from_numpy(array) for array in strategy.newest)
    model.load_state_dict(dict(zip(model.state_dict(), arrays, strict=True)))
    Path(work.folder, "final-0.json").write_text(json.dumps({"loss": held_out_loss(model, work.seq)}))
    sys.exit(0)

import flwr

work = Workload.from_arguments()
taken = iter(range(10**9))


class Client(flwr.client.NumPyClient):  # +
    def fit(self, parameters, config):
        named = zip(work.model.state_dict(), (torch.from_numpy(p) for p in parameters), strict=True)
        work.model.load_state_dict(dict(named))
        for _ in range(work.options.period):
            loss = work.forward()
            loss.backward()
            work.optimizer.step()
            work.record(next(taken), loss.item())
        arrays = [value.numpy().copy() for value in work.model.state_dict().values()]
        return arrays, work.tokens * work.options.period, {}


next(work.steps())
flwr.client.start_client(server_address=work.options.coordinator, client=Client().to_client(), insecure=True)  # +
