"""Hugging Face Trainer with Atoll: the two lines marked "Atoll" are all that was added.

    atoll run --learners 2 -- python examples/train_hf.py --steps 60

A small GPT-2 learns the Python standard library's source, byte by byte. Nothing is downloaded.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from atoll.integrations.hf import AtollCallback  # Atoll, line 1

CONTEXT = 64


def cut(data: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """The text in windows of CONTEXT bytes."""
    return [{"input_ids": window, "labels": window} for window in data.split(CONTEXT) if len(window) == CONTEXT]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", default="hf-output")
    options = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-d]*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        warmup_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
    )
    train, held_out = cut(data[:-65536]), cut(data[-65536:])
    callbacks = [AtollCallback()]  # Atoll, line 2
    trainer = Trainer(model=model, args=args, train_dataset=train, eval_dataset=held_out, callbacks=callbacks)
    trainer.train()
    print(f"published model: held-out loss {trainer.evaluate()['eval_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
