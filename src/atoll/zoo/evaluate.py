"""The loss on held-out bytes, always over the same windows; and the saved form of a model."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import ConfigError, CorpusError
from atoll.learner import load_model
from atoll.zoo.corpus import Corpus
from atoll.zoo.gpt import GPT, next_byte_loss
from atoll.zoo.presets import model_config


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 arithmetic on a GPU, fp32 on the CPU (where bfloat16 is slow, and on some machines not there at all)."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def held_out_batches(corpus: Corpus, *, batch: int, seq: int, batches_max: int) -> list[tuple[Tensor, Tensor]]:
    """At most `batches_max` pairs (inputs, targets) of disjoint windows, spread evenly over the held-out part."""
    if min(batch, seq, batches_max) < 1:
        raise ConfigError(f"batch, seq and batches_max must be at least 1; not {batch}, {seq} and {batches_max}")
    windows_count = (len(corpus.held_out) - 1) // seq
    if windows_count < 1:
        raise CorpusError(
            f"the held-out part of the corpus {corpus.source} has {len(corpus.held_out)} bytes, but a window takes "
            f"{seq + 1}; use a larger corpus or a smaller --seq"
        )
    wanted = min(windows_count, batch * batches_max)
    starts = np.arange(wanted) * windows_count // wanted * seq
    windows = torch.from_numpy(corpus.held_out[starts[:, None] + np.arange(seq + 1)].astype(np.int64))
    return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in torch.split(windows, batch)]


@torch.no_grad()
def eval_totals(model: nn.Module, batches: list[tuple[Tensor, Tensor]], device: torch.device) -> tuple[float, int]:
    """(summed loss in nats, number of bytes) over `batches`. Leaves the model in the mode in which it found it."""
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in batches:
        with autocast(device):
            loss = next_byte_loss(model, inputs.to(device), targets.to(device))
        total += float(loss) * targets.numel()
        count += targets.numel()
    model.train(was_training)
    return total, count


def eval_loss(
    model: nn.Module,
    corpus: Corpus,
    *,
    batch: int,
    seq: int,
    batches_max: int = 16,
    device: torch.device | str = "cpu",
) -> float:
    """Mean loss on the held-out part, nats per byte."""
    batches = held_out_batches(corpus, batch=batch, seq=seq, batches_max=batches_max)
    total, count = eval_totals(model, batches, torch.device(device))
    return total / count


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write the parameters as safetensors under their own names (a tied tensor once); readers never see half a file."""
    from safetensors.torch import save

    path = Path(path)
    tensors = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_bytes(save(tensors))  # save_file would give the file mode 0600
    partial.replace(path)


def load_saved(path: str | Path, model: str) -> GPT:
    """The preset `model` with the parameters in `path`, as `save_model` or the syncer wrote them."""
    gpt = GPT(model_config(model))
    try:
        load_model(path, gpt)
    except ConfigError as error:
        raise ConfigError(
            f"{path} does not hold a model of the size {model!r}; name the size that it was trained with"
        ) from error
    return gpt
