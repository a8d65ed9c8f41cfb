"""The reference GPT: shapes, causality, sizes, learning, sampling."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from atoll.errors import ConfigError
from atoll.zoo import GPT, PRESETS, GPTConfig, build_model, count_parameters, model_config, sample
from atoll.zoo.gpt import next_byte_loss


def warmed(config: GPTConfig) -> GPT:
    """A model whose residual outputs are not zero, so that attention matters."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def test_front_door_does_not_import_torch() -> None:
    code = "import sys, atoll.zoo as z; z.WorkerConfig(); z.model_config('tiny'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_front_door_name_exists() -> None:
    import atoll.zoo

    for name in atoll.zoo.__all__:
        assert getattr(atoll.zoo, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = atoll.zoo.nothing


def test_names_and_shapes() -> None:
    model = build_model("tiny", seed=0)
    names = [name for name, _ in model.named_parameters()]
    assert names[0] == "embed.weight" and names[-1] == "head.weight"
    assert "blocks.1.attention.qkv.weight" in names and "blocks.0.mlp.down.weight" in names
    assert model(torch.randint(256, (3, 17))).shape == (3, 17, 256)


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("nano", 50e3, 100e3),
        ("tiny", 0.4e6, 1.5e6),
        ("small", 9e6, 12e6),
        ("medium", 30e6, 40e6),
        ("base", 90e6, 125e6),
    ],
)
def test_preset_sizes(name: str, low: float, high: float) -> None:
    config = model_config(name)
    with torch.device("meta"):
        built = sum(p.numel() for p in GPT(config).parameters())
    assert built == count_parameters(config)
    assert low <= built <= high


def test_unknown_preset_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="nano, tiny, small, medium, base"):
        model_config("huge")


def test_width_that_does_not_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 10"):
        GPTConfig(layers=1, heads=5, width=64, lr=1e-3)


def test_later_bytes_do_not_change_earlier_logits() -> None:
    model = warmed(PRESETS["nano"])
    tokens = torch.randint(256, (2, 24))
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :15], after[:, :15])
    assert not torch.allclose(before[:, 15:], after[:, 15:])


def test_order_of_earlier_bytes_matters() -> None:
    """Without positions, attention over a set of bytes would not see their order."""
    model = warmed(GPTConfig(layers=1, heads=2, width=32, lr=1e-3))
    one, other = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[2, 1, 3, 4]]))
    assert not torch.allclose(one[:, -1], other[:, -1], atol=1e-4)


def test_cached_positions_equal_the_whole_pass() -> None:
    model = warmed(PRESETS["nano"])
    tokens = torch.randint(256, (1, 12))
    whole = model(tokens)
    logits, past = model.advance(tokens[:, :5], 0, None)
    for position in range(5, 12):
        logits, past = model.advance(tokens[:, position : position + 1], position, past)
        torch.testing.assert_close(logits[:, -1], whole[:, position], atol=1e-4, rtol=1e-4)


def test_tied_head_is_one_tensor() -> None:
    model = build_model("nano", seed=0)
    assert model.config.tied and model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


def test_same_seed_same_bits_and_first_loss_is_near_uniform() -> None:
    one, two, other = build_model("nano", 3), build_model("nano", 3), build_model("nano", 4)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.embed.weight, other.embed.weight)
    tokens = torch.randint(256, (4, 33))
    assert abs(next_byte_loss(one, tokens[:, :-1], tokens[:, 1:]).item() - math.log(256)) < 0.3


def test_sample_is_reproducible_and_longer_than_the_context() -> None:
    model = build_model("nano", seed=0)
    text = sample(model, "def ", 150, seed=1)
    assert text.startswith("def ") and text == sample(model, "def ", 150, seed=1)
    assert text != sample(model, "def ", 150, seed=2)
    assert model.training
    long = "x" * 200
    assert sample(model, long, 3).startswith(long)
    with pytest.raises(ConfigError, match="prompt"):
        sample(model, "", 5)


def test_a_compiled_model_has_its_angles_from_one_operator_and_gives_the_same() -> None:
    model, tokens, graphs = build_model("nano", 0), torch.arange(8)[None], list[torch.fx.GraphModule]()

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    assert torch.equal(torch.compile(model, backend=look)(tokens), model(tokens))
    [graph] = graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert targets.count("atoll.rope_angles.default") == 1 and not any("cos" in target for target in targets)


def test_evaluation_does_not_load_the_compiler() -> None:
    code = "import sys, torch; from atoll.zoo import build_model; build_model('nano', 0)(torch.zeros(1, 8).long())"
    code += "; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
