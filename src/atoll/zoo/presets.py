"""The sizes in which the reference GPT comes. Pure data: no torch here, so the command line can read it at once."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.errors import ConfigError

VOCAB = 256
"""The model reads and writes bytes: no tokenizer to install, and nats per byte compare across corpora."""
OPTIMIZERS = ("muon", "adamw", "sgd")
"""The first is the default: on an H200 it ended 6% below AdamW at 10.8M parameters, on a CPU 4% below at 68k
(each at its better rates; docs/results/lab.md), at about the same speed."""
MUON_LR_FACTOR = 5.0
"""Muon's learning rate in those of AdamW: `small` was best with 8 in a short run and was given 6 in the long ones
(docs/results/lab.md), `tiny` gave 1.77 nats with 1 and 1.61 with 4."""
SCHEDULES = ("cosine", "wsd", "constant")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a reference GPT, and a learning rate to start from."""

    layers: int
    heads: int
    width: int
    """Size of the residual stream; a multiple of `heads`, and the quotient is even (RoPE rotates pairs)."""
    lr: float
    """Peak learning rate of AdamW. A rule of thumb, not tuned: only `tiny` was tried (one seed, 300 steps, batch 8, seq
    128: held-out loss 2.050 at 2e-3, 2.061 at 4e-3, 2.290 at 8e-3; 3e-3 lies between)."""
    tied: bool = False
    """The output head is the embedding's own tensor."""
    mlp_factor: int = 4
    """Hidden size of the MLP, in widths."""
    context: int = 256
    """How many bytes back `sample` lets the model look. Training may use any length."""

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "mlp_factor", "context"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"GPTConfig.{name} must be a whole number from 1; not {value!r}")
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"width {self.width} does not split into {self.heads} heads of even size; "
                f"choose a width that is a multiple of {2 * self.heads}"
            )


PRESETS: dict[str, GPTConfig] = {
    "nano": GPTConfig(layers=2, heads=2, width=48, lr=4e-3, tied=True, context=128),
    "tiny": GPTConfig(layers=2, heads=4, width=128, lr=3e-3, context=128),
    "small": GPTConfig(layers=6, heads=6, width=384, lr=1e-3),
    "medium": GPTConfig(layers=11, heads=8, width=512, lr=8e-4, context=512),
    "base": GPTConfig(layers=14, heads=12, width=768, lr=6e-4, context=1024),
}


def model_config(name: str) -> GPTConfig:
    """The preset called `name`."""
    try:
        return PRESETS[name]
    except KeyError:
        raise ConfigError(f"model must be one of {', '.join(PRESETS)}; not {name!r}") from None


def own_lr(model: str, optimizer: str) -> float:
    """The peak learning rate to start from, for a preset and an inner optimizer."""
    return model_config(model).lr * (MUON_LR_FACTOR if optimizer == "muon" else 1.0)


def count_parameters(config: GPTConfig) -> int:
    """Trainable parameters of a GPT of this shape, without building it."""
    attention = 4 * config.width**2  # qkv and output
    mlp = 2 * config.mlp_factor * config.width**2  # up and down
    tables = VOCAB * config.width * (1 if config.tied else 2)
    return config.layers * (attention + mlp) + tables
