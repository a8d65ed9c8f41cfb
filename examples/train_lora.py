"""Fine-tuning with LoRA (peft): only the adapters travel. The three lines marked "Atoll" are all that was added.

    atoll run --learners 2 -- python examples/train_lora.py --steps 60

The base model is made here with a fixed seed, since nothing can be downloaded; load your own with from_pretrained.
Its frozen weights must be the same in all learners: Atoll compares their checksums and warns.
"""

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import atoll  # Atoll, line 1

CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("[a-b]*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, CONTEXT, 16)

    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=CONTEXT, n_embd=64, n_layer=2, n_head=2))
    lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    model = get_peft_model(base, lora)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=3e-3)

    with atoll.Learner(model, optimizer) as learner:  # Atoll, line 2
        generator = torch.Generator().manual_seed(1 + learner.rank)  # each learner reads data of its own
        while learner.step_count < options.steps and not learner.done:
            batch = windows[torch.randint(len(windows), (16,), generator=generator)]
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            learner.step(tokens=batch.numel(), loss=loss)  # Atoll, line 3
            if learner.step_count % 20 == 0:
                print(f"step {learner.step_count:4d}  loss {loss.item():.3f} nats per byte")
        print(f"{len(learner.published_state_dict())} adapter tensors were synced")


if __name__ == "__main__":
    main()
