"""torchtitan's real trainer, model, optimizers, schedules and loss, on a CPU.

torchtitan expects a GPU and Triton. What is replaced here is only that: the kernels of mixtures of experts (which need
Triton to be imported at all), the name of the device, and the monitor of a GPU's memory.
"""

from __future__ import annotations

import os
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist


def prepare() -> None:
    pytest.importorskip("torchtitan.config")
    os.environ.setdefault("LOCAL_RANK", "0")
    import torchtitan.components.metrics as metrics
    import torchtitan.train

    assert torchtitan.train
    torch.cpu.set_device = lambda _device: None  # type: ignore[assignment]
    for module in [module for name, module in sys.modules.items() if name.startswith("torchtitan.")]:
        if hasattr(module, "device_type"):
            module.device_type = "cpu"
        if hasattr(module, "device_module"):
            module.device_module = torch.cpu
    metrics.DeviceMemoryMonitor = _NoMonitor
    torchtitan.train.dist_utils.set_pg_timeouts = lambda **_: None  # it names a GPU
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def without_kernels() -> None:
    """Before torchtitan is first imported."""
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = None  # type: ignore[attr-defined]
    sys.modules.setdefault("torchtitan.models.moe.kernels", kernels)


class _NoMonitor:
    device_name, device_capacity_gib = "cpu", 0.0

    def __init__(self, *_: Any) -> None: ...

    def get_peak_stats(self) -> Any:
        from torchtitan.components.metrics import DeviceMemStats

        return DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None: ...


class Batches:
    """What a torchtitan data loader gives: inputs and labels."""

    def __init__(self, **_: Any) -> None:
        self._generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Any]:
        while True:
            time.sleep(0.01)  # a step of a GPU; the syncer of a test is in the same process
            tokens = torch.randint(0, 64, (4, 17), generator=self._generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None: ...


def register(name: str, validated: list[Any]) -> None:
    """A small llama3, with torchtitan's own optimizers, schedules, loss and parallelisation."""
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    class Validator:
        def __init__(self, **_: Any) -> None: ...

        def should_validate(self, step: int) -> bool:
            return step % 5 == 0

        def validate(self, parts: Any, step: int) -> None:
            validated.append((step, {n: p.detach().clone() for n, p in parts[0].named_parameters()}))

    register_train_spec(
        name,
        TrainSpec(
            model_cls=Transformer,
            model_args={"tiny": TransformerModelArgs(dim=32, n_layers=2, n_heads=2, vocab_size=64, max_seq_len=64)},
            parallelize_fn=parallelize_llama,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=Batches,
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
            build_validator_fn=Validator,
        ),
    )


def job(name: str, steps: int, folder: str) -> Any:
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name, config.model.flavor = name, "tiny"
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 16, 4
    config.training.mixed_precision_param = "float32"
    config.lr_scheduler.warmup_steps = 10
    config.optimizer.lr, config.optimizer.implementation = 0.01, "foreach"
    config.validation.enable = True
    config.metrics.log_freq = 1000
    return config
