"""The random number generators of a process: Python's, numpy's, torch's, and those of its GPUs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from atoll.learner.inner.captured import WRONG

GENERATORS = {"python", "numpy", "torch", "cuda"}


def random_state() -> dict[str, Any]:
    cuda = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=True),
        "torch": torch.get_rng_state(),
        "cuda": {device: torch.cuda.get_rng_state(device) for device in cuda},
    }


def seed(state: dict[str, Any]) -> list[str]:
    seeders: dict[str, Callable[[], Any]] = {
        "python": lambda: random.setstate(state["python"]),
        "numpy": lambda: np.random.set_state(state["numpy"]),
        "torch": lambda: torch.set_rng_state(state["torch"]),
    }
    lost = []
    for device, value in state["cuda"].items():
        if device < torch.cuda.device_count():
            seeders[f"cuda:{device}"] = partial(torch.cuda.set_rng_state, value, device)
        else:
            lost.append(f"random numbers of cuda:{device}: there is no such device")
    for name, seed in seeders.items():
        try:
            seed()
        except WRONG as error:
            lost.append(f"random numbers of {name}: {type(error).__name__}: {error}")
    return lost
