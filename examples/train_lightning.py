"""Lightning with Atoll: the two lines marked "Atoll" are all that was added.

atoll run --learners 2 -- python examples/train_lightning.py --steps 100
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from torch import nn

from atoll.integrations.lightning import AtollCallback  # Atoll, line 1

CONTEXT = 16


class NextByte(lightning.LightningModule):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(256, 16)
        self.mlp = nn.Sequential(nn.Linear(CONTEXT * 16, 128), nn.GELU(), nn.Linear(128, 256))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (windows,) = batch
        logits = self.mlp(self.embed(windows[:, :-1]).flatten(1))
        return nn.functional.cross_entropy(logits, windows[:, -1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.log("held_out", self.training_step(batch, index))

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 5)
    torch.manual_seed(0)
    module = NextByte(steps)
    train = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data[:-2048]), 64, shuffle=True)
    held_out = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data[-2048:]), 512)
    callback = AtollCallback(tokens=lambda batch: len(batch[0]))  # Atoll, line 2
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=steps, val_check_interval=50, callbacks=[callback], **quiet)
    trainer.fit(module, train, held_out)
    (result,) = trainer.validate(module, held_out, verbose=False)
    print(f"published model: held-out loss {result['held_out']:.3f} nats per byte")


if __name__ == "__main__":
    main()
