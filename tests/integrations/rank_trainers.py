"""What each rank runs under `atoll run --ranks 2`: the trainers of others, on a small model, on a CPU.

python rank_trainers.py KIND FOLDER STEPS
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH, WIDTH = 4, 32


class Small(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x).square().mean()}


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((WIDTH,), index / 256.0)} for index in range(256)]


def let_accelerate_shard_on_cpus() -> None:
    """accelerate takes FSDP plugins on devices alone: ranks on CPUs fall back to DDP. This is all that is replaced."""
    from accelerate.state import AcceleratorState, DistributedType

    real = AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        real(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = init


def sharded_by_accelerate(folder: Path, steps: int, version: int = 2) -> Any:
    """Hugging Face's Trainer with `fsdp=`: accelerate cuts the model with fully_shard (or, version 1, wraps it)."""
    from torch.distributed.tensor import DTensor

    let_accelerate_shard_on_cpus()
    config = {"version": version, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}
    if version == 1:  # else accelerate looks for a GPU to send the first parameters from
        config |= {"sync_module_states": False, "cpu_ram_efficient_loading": False}
    learner = hugging_face(folder, steps, fsdp=True, fsdp_config=config)
    assert any(isinstance(parameter, DTensor) for parameter in learner._model.parameters()), "it was not sharded"
    return learner


def hugging_face(folder: Path, steps: int, **more: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from atoll.integrations.hf import AtollCallback

    args = TrainingArguments(
        **more,
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = AtollCallback()
    trainer = Trainer(model=Small(), args=args, train_dataset=samples(), callbacks=[callback])
    trainer.train()
    return callback.learner


def lightning(folder: Path, steps: int) -> Any:
    import lightning

    from atoll.integrations.lightning import AtollCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.small(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    callback = AtollCallback(tokens=lambda batch: batch["x"].numel())
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", devices=2, strategy="ddp", callbacks=[callback], **quiet
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(samples(), BATCH, shuffle=True))
    return callback.learner


def accelerate(folder: Path, steps: int) -> Any:
    from accelerate import Accelerator

    import atoll

    accelerator = Accelerator(cpu=True)
    model = Small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples(), BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with atoll.Learner(model, optimizer) as learner:
        while learner.step_count < steps:
            for batch in loader:
                loss = model(**batch)["loss"]
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                learner.step(tokens=batch["x"].numel(), loss=loss)
                if learner.step_count >= steps:
                    break
    return learner


def main() -> None:
    kind, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    kinds = {"hf": hugging_face, "lightning": lightning, "accelerate": accelerate}
    kinds |= {"fsdp2": sharded_by_accelerate, "fsdp1": partial(sharded_by_accelerate, version=1)}
    learner = kinds[kind](folder, steps)
    told = {"size": learner.island_size, "step": learner.step_count, "handed_over": learner.handed_over}
    (folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
