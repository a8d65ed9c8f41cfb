"""JAX processes that torchrun has started (`atoll run --ranks`): how they become one world of `jax.distributed`."""

from __future__ import annotations

import os
import socket

import jax

from atoll.errors import ConfigError

KEY = "atoll.jax.coordinator"
STARTED_WITH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def initialize() -> None:
    """`jax.distributed.initialize` by what torchrun says in the environment; each process has the device of its number.
    With one process there is nothing to do. The ranks tell each other through torchrun's own store which port the
    coordinator has."""
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE") == "1":
        return
    if missing := [name for name in STARTED_WITH if name not in os.environ]:
        raise ConfigError(
            f"{missing[0]} is not in the environment, so that torchrun has not started this process; call "
            "jax.distributed.initialize with what your launcher says"
        )
    # It takes SIGTERM for itself and lets the process live on; the learner hears it, and before it joins it is the end.
    jax.config.update("jax_enable_preemption_service", False)  # type: ignore[no-untyped-call]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    jax.distributed.initialize(
        _coordinator(rank, size), size, rank, [int(os.environ["LOCAL_RANK"])], cluster_detection_method="deactivate"
    )


def towards(address: str | None) -> str:
    """The syncer's host, towards which the processes of an island have the network that they share."""
    return (address or os.environ.get("ATOLL_SYNCER", "")).rsplit(":", 1)[0].strip("[]")


def _coordinator(rank: int, size: int) -> str:
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise ConfigError(f"ranks of torchrun find each other with torch ({error}); pip install torch") from error
    host = os.environ["MASTER_ADDR"]
    store = dist.TCPStore(host, int(os.environ["MASTER_PORT"]), size, False)  # type: ignore[attr-defined]
    key = f"{KEY}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    if rank == 0:
        with socket.socket() as probe:
            probe.bind(("", 0))
            store.set(key, str(probe.getsockname()[1]))
    return f"{host}:{int(store.get(key))}"
