"""The reference GPT: byte-level, pre-norm, RoPE, causal attention, GELU. Small enough to read in one go.

Parameter names are part of the contract with reports, layouts and saved files:

    embed.weight                          (256, width)
    blocks.I.attention.qkv.weight         (3 * width, width)
    blocks.I.attention.output.weight      (width, width)       starts at zero
    blocks.I.mlp.up.weight                (mlp_factor * width, width)
    blocks.I.mlp.down.weight              (width, mlp_factor * width)    starts at zero
    head.weight                           (256, width)         absent when tied

There are no buffers (the RoPE angles are a few thousand numbers, computed where they are used) and no gains in the
norms (the next matrix can learn them). Timed alone on one thread of a shared machine, forward and backward of 8 x 128
positions of width 128: GELU 1.8 ms, squared ReLU 6.8 ms; RMSNorm 1.5 ms without gain, 2.2 ms with it. What that gives
a whole training step was lost in the machine's noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.zoo.presets import VOCAB, GPTConfig, model_config

ROPE_BASE = 10_000.0
EMBED_STD = 0.02

ROPE_SCHEMA = "(SymInt start, SymInt count, SymInt head_dim, Device device) -> (Tensor, Tensor)"
"""Said here because torch 2.4 cannot read it off annotations that are text."""

KeysValues = tuple[Tensor, Tensor]
"""What attention remembers of earlier positions: keys and values, each (batch, heads, positions, head_dim)."""


def rope_angles(start: int, count: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the RoPE rotation (Su et al. 2021, equation 34) of `count` positions from `start`: each
    (count, head_dim / 2), fp32."""
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    positions = torch.arange(start, start + count, dtype=torch.float32, device=device)
    angle = torch.outer(positions, ROPE_BASE ** (-pair / head_dim))
    return angle.cos(), angle.sin()


rope_operator = torch.library.custom_op("atoll::rope_angles", rope_angles, mutates_args=(), schema=ROPE_SCHEMA)
"""For torch.compile, which would otherwise work the angles out again for every element that they turn: on an H200 that
took 38% of a training step of `small`. Its first call loads the compiler, a second that others need not wait for."""


@rope_operator.register_fake
def _(start: int, count: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    shape = (count, head_dim // 2)
    return torch.empty(shape, device=device), torch.empty(shape, device=device)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs (first half, second half) of the last dimension by their position's angle."""
    cos, sin = (a.to(x.dtype) for a in angles)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without gain."""
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """Causal multi-head self-attention; queries and keys are rotated by their position."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        batch, seq, width = x.shape
        # (batch, seq, 3 * width) -> three of (batch, heads, seq, head_dim)
        q, k, v = self.qkv(x).view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, angles), rotate(k, angles)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        # With a past there is exactly one query (see `sample`): it may see every key, so no mask is needed.
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.output(mixed.transpose(1, 2).reshape(batch, seq, width)), (k, v)


class MLP(nn.Module):
    """Two linear maps with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_factor * config.width, bias=False)
        self.down = nn.Linear(config.mlp_factor * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, angles: tuple[Tensor, Tensor], past: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        mixed, present = self.attention(norm(x), angles, past)
        x = x + mixed
        return x + self.mlp(norm(x)), present


class GPT(nn.Module):
    """`model(tokens)` with tokens (batch, seq) int64 gives the logits of each next byte, (batch, seq, 256)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, VOCAB, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self._initialise()

    def _initialise(self) -> None:
        """Normal with std 1/sqrt(fan_in) for the inner matrices; zero for what writes to the residual stream, so that
        every block starts as the identity; small for the tables, so that the first loss is about ln 256 = 5.55."""
        for name, parameter in self.named_parameters():
            if name.endswith(("attention.output.weight", "mlp.down.weight")):
                nn.init.zeros_(parameter)
            elif name.startswith(("embed.", "head.")):
                nn.init.normal_(parameter, std=EMBED_STD)
            else:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        logits, _ = self.advance(tokens, position=0, past=None)
        return logits

    def advance(self, tokens: Tensor, position: int, past: list[KeysValues] | None) -> tuple[Tensor, list[KeysValues]]:
        """Logits for `tokens`, the first of which stands at `position`, and the keys and values to pass on."""
        head_dim = self.config.width // self.config.heads
        turn = rope_operator if torch.compiler.is_compiling() else rope_angles
        angles = turn(position, tokens.shape[1], head_dim, tokens.device)
        x = self.embed(tokens)
        present = []
        for index, block in enumerate(self.blocks):
            x, keys_values = block(x, angles, past[index] if past is not None else None)
            present.append(keys_values)
        return self.head(norm(x)), present


def build_model(name: str, seed: int) -> GPT:
    """The preset called `name` with parameters that depend on `seed` alone: every learner starts from the same bits."""
    config = model_config(name)
    torch.manual_seed(seed)
    return GPT(config)


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the targets, nats per byte."""
    logits = model(inputs)
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


@torch.no_grad()
def sample(model: GPT, prompt: str, n: int, seed: int = 0, *, temperature: float = 0.8) -> str:
    """`prompt` and `n` more bytes from the model, as text. Bytes that are not UTF-8 show as the replacement character.

    Keys and values are kept, so a byte costs one position's work; the model looks back `config.context` bytes.
    """
    if not prompt:
        raise ConfigError("sample needs a prompt of at least one character, for example 'def '")
    if temperature <= 0:
        raise ConfigError(f"temperature must be above 0; not {temperature!r}")
    device = model.embed.weight.device
    dice = torch.Generator().manual_seed(seed)  # on the CPU, so that one seed gives one text on every device
    text = bytearray(prompt.encode())[-model.config.context :]
    dropped = prompt.encode()[: -len(text)]
    was_training = model.training
    model.eval()
    logits, past = model.advance(torch.tensor([list(text)], device=device), position=0, past=None)
    for _ in range(n):
        chances = torch.softmax(logits[0, -1].float().cpu() / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=dice)))
        past = [(k[:, :, 1 - model.config.context :], v[:, :, 1 - model.config.context :]) for k, v in past]
        logits, past = model.advance(torch.tensor([[text[-1]]], device=device), position=len(text) - 1, past=past)
    model.train(was_training)
    return (dropped + text).decode(errors="replace")
