"""A training script of nanoGPT's shape: settings as globals, one loop, a scaler, accumulated gradients, no functions to
call. Written for the test of examples/nanogpt.diff; what the diff holds on to has nanoGPT's own names."""

import math
import os

import numpy as np
import torch
from torch import nn

max_iters = int(os.environ.get("MAX_ITERS", "60"))
eval_interval, eval_iters = 20, 4
batch_size, block_size, gradient_accumulation_steps = 8, 16, 2
learning_rate, warmup_iters, lr_decay_iters, min_lr = 3e-3, 5, 60, 3e-4
device, dtype = "cpu", "float32"
tokens_per_iter = gradient_accumulation_steps * batch_size * block_size
torch.manual_seed(1337)
data = np.fromfile(os.__file__, np.uint8)


def get_batch(split):
    part = data[: len(data) * 9 // 10] if split == "train" else data[len(data) * 9 // 10 :]
    ix = torch.randint(len(part) - block_size - 1, (batch_size,))
    x = torch.stack([torch.from_numpy(part[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(part[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.mix, self.head = nn.Embedding(256, 32), nn.GRU(32, 64, batch_first=True), nn.Linear(64, 256)

    def forward(self, idx, targets):
        logits = self.head(self.mix(self.wte(idx))[0])
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


iter_num, best_val_loss = 0, 1e9
model = Model().to(device)
scaler = torch.amp.GradScaler(device, enabled=(dtype == "float16"))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)


@torch.no_grad()
def estimate_loss():
    model.eval()
    found = {
        split: float(np.mean([model(*get_batch(split))[1] for _ in range(eval_iters)])) for split in ("train", "val")
    }
    model.train()
    return found


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# training loop
X, Y = get_batch("train")
while True:
    for param_group in optimizer.param_groups:
        param_group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}", flush=True)
    for _micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch("train")
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1

    # termination conditions
    if iter_num > max_iters:
        break
