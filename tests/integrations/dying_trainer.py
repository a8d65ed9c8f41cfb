"""A trainer of either library that is killed once in the middle, and goes on when `atoll run` starts it again.

python dying_trainer.py hf|lightning FOLDER STEPS
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

KIND, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
DIES_AT = STEPS // 3
BEGUN = FOLDER / f"begun-{os.environ['ATOLL_LEARNER']}.jsonl"
"""One line for each start: the step at which it began, and the learning rate then."""


class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((32,), index / 64.0)}


class Small(nn.Module):
    main_input_name = "x"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 32))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.net(x) - x).square().mean()}


def note(step: int, rate: float) -> None:
    with BEGUN.open("a") as file:
        file.write(json.dumps({"step": step, "rate": rate}) + "\n")


def maybe_die(step: int) -> None:
    time.sleep(0.02)
    if step == DIES_AT and len(BEGUN.read_text().splitlines()) == 1:
        os._exit(9)


def with_hugging_face() -> int:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from atoll.integrations.hf import AtollCallback

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **run: Any) -> None:
            if not getattr(self, "noted", False):
                self.noted = True
                note(state.global_step, run["lr_scheduler"].get_last_lr()[0])

        def on_step_end(self, args: Any, state: Any, control: Any, **run: Any) -> None:
            maybe_die(state.global_step)

    args = TrainingArguments(
        output_dir=str(FOLDER / "out"),
        per_device_train_batch_size=4,
        learning_rate=0.01,
        max_steps=STEPS,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=Small(), args=args, train_dataset=Pairs(), callbacks=[AtollCallback(), Watch()])
    trainer.train()
    return int(trainer.state.global_step)


def with_lightning() -> int:
    import lightning

    from atoll.integrations.lightning import AtollCallback

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if not getattr(self, "noted", False):
                self.noted = True
                note(trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            maybe_die(trainer.global_step)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.small = Small()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.small(batch["x"])["loss"]

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    callbacks = [AtollCallback(tokens=lambda batch: batch["x"].numel()), Watch()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    trainer = lightning.Trainer(max_steps=STEPS, callbacks=callbacks, enable_checkpointing=False, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(Pairs(), 4, shuffle=True))
    return int(trainer.global_step)


if __name__ == "__main__":
    ended = with_hugging_face() if KIND == "hf" else with_lightning()
    (FOLDER / f"ended-{os.environ['ATOLL_LEARNER']}").write_text(str(ended))
