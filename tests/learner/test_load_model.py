"""Names without wrappers, and `atoll.load_model`: what fits is loaded, and what does not is said."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cluster import SyncerThread, TrainingThread, small_model
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import atoll
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.errors import ConfigError, LayoutError, PayloadError
from atoll.learner.torch_parameters import describe


class Own(nn.Module):
    """A user's attribute that is called as a wrapper's, a part to compile, tied weights, a scalar, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(x)
        return y


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, as a script has that always wraps its model."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def part_compiled() -> nn.Module:
    model = Own()
    model.blocks[0] = compiled(model.blocks[0])
    return model


def part_checkpointed() -> nn.Module:
    model = Own()
    model.blocks[0] = checkpoint_wrapper(compiled(model.blocks[0]))
    return model


def wrapped(alone: None) -> dict[str, nn.Module]:
    return {
        "compiled": compiled(Own()),
        "a part of it": part_compiled(),
        "data-parallel": nn.DataParallel(Own()),
        "distributed": nn.parallel.DistributedDataParallel(Own()),
        "compiled and distributed": nn.parallel.DistributedDataParallel(compiled(Own())),
        "distributed and compiled": compiled(nn.parallel.DistributedDataParallel(Own())),
        "checkpointed": checkpoint_wrapper(Own()),
        "a part of it checkpointed": part_checkpointed(),
        "checkpointed and compiled": compiled(checkpoint_wrapper(part_compiled())),
        "a part of it checkpointed, and distributed": nn.parallel.DistributedDataParallel(part_checkpointed()),
    }


def test_a_wrapped_model_is_laid_out_as_the_plain_one(alone: None) -> None:
    plain = build_layout(describe(Own(), {}), 2)
    assert "module.weight" in {spec.name for spec in plain.tensors}, "an attribute of the user's keeps its name"
    for how, model in wrapped(alone).items():
        assert build_layout(describe(model, {}), 2).fingerprint == plain.fingerprint, how


def test_merge_modes_take_the_names_that_a_wrapped_model_tells() -> None:
    model = compiled(Own())
    told = next(name for name, _ in model.named_parameters() if name.endswith("blocks.0.weight"))
    assert told.startswith("_orig_mod.")
    for name in (told, "blocks.0.weight"):
        modes = {spec.name: spec.merge for spec in describe(model, {name: "mean"})}
        assert modes["blocks.0.weight"] == "mean" and modes["blocks.1.weight"] == "rda"


def test_a_wrappers_own_parameter_must_not_hide_the_models(alone: None) -> None:
    class Headed(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)
            self.scale = nn.Parameter(torch.tensor(1.0))

    with pytest.raises(LayoutError, match="rename"):
        describe(Headed(Own()), {})


def test_a_compiled_and_a_plain_learner_train_the_same_model(tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(sync_every=4, fragments=2, learners_expected=2, quorum="all"))
    learners = [
        TrainingThread(syncer.address, "plain", seed=1),
        TrainingThread(syncer.address, "compiled", seed=2, model=compiled(small_model())),
    ]
    try:
        syncer.wait_for(lambda s: all(t.version >= 3 for t in s.machine.book.tracks), "both contribute")
    finally:
        for learner in learners:
            learner.stop()
    assert [learner.error for learner in learners] == [None, None]
    syncer.ask(lambda s: s.state.save(tmp_path / "model.safetensors"))
    syncer.stop()
    expected = dict(small_model().named_parameters())
    for into in (small_model(), compiled(small_model())):
        assert atoll.load_model(tmp_path / "model.safetensors", into) == ((), ())
        loaded = dict(getattr(into, "_orig_mod", into).named_parameters())
        published = learners[0].learner.published_state_dict()
        assert loaded.keys() == published.keys() == expected.keys()


# ---------------------------------------------------------------- loading


def saved(path: Path, prefix: str = "", **changes: Any) -> dict[str, torch.Tensor]:
    """What a syncer writes of an Own: trainable parameters, a tied one once, a scalar as one element, in fp32."""
    torch.manual_seed(5)
    model = Own()
    values = {name: torch.randn_like(p) for name, p in model.named_parameters() if p.requires_grad}
    values["scale"] = values["scale"].reshape(1)
    values = {name: value for name, value in {**values, **changes}.items() if value is not None}
    save_file({prefix + name: value for name, value in values.items()}, path)
    return values


def holds(model: nn.Module, values: dict[str, torch.Tensor]) -> bool:
    own = dict(model.named_parameters())
    return all(torch.equal(own[name].float().cpu().reshape(value.shape), value) for name, value in values.items())


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod.", "_checkpoint_wrapped_module."])
def test_a_file_goes_into_a_module_wrapped_or_not(prefix: str, tmp_path: Path) -> None:
    """Up to 0.4, files of compiled and wrapped models had the wrappers' segments in their names."""
    path = tmp_path / "model.safetensors"
    values = saved(path, prefix)
    for wrap in (lambda m: m, compiled, nn.DataParallel):
        model = Own()
        left = atoll.load_model(path, wrap(model))  # type: ignore[no-untyped-call]
        assert holds(model, values)
        assert torch.equal(model.head.weight.cpu(), values["embedding.weight"]), "tied weights stay tied"
        assert "frozen.weight" in left.missing and "norm.running_mean" in left.missing and left.unexpected == ()
        assert not any(name in left.missing for name in ("scale", "head.weight"))


def test_values_take_the_modules_type_and_buffers_are_loaded_if_they_are_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    mean, seen = torch.full((4,), 3.0), torch.tensor(7)
    values = saved(path, **{"norm.running_mean": mean, "norm.num_batches_tracked": seen})
    model = Own().to(torch.bfloat16)
    atoll.load_model(path, model)
    assert model.module.weight.dtype is torch.bfloat16
    assert torch.equal(model.module.weight, values["module.weight"].to(torch.bfloat16))
    assert torch.equal(model.norm.running_mean.float(), mean) and int(model.norm.num_batches_tracked) == 7


def test_a_file_in_which_nothing_fits_is_refused_even_if_not_strict(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"transformer.wte.weight": torch.zeros(2, 2)}, path)
    for strict in (True, False):
        with pytest.raises(ConfigError, match=r"nothing in .* fits this Own: the file has 'transformer.wte.weight'"):
            atoll.load_model(path, Own(), strict=strict)
    save_file({}, path)
    with pytest.raises(ConfigError, match="nothing in"):
        atoll.load_model(path, Own(), strict=False)


def test_what_is_missing_or_too_much_is_an_error_unless_told_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved(path, **{"scale": None, "module.bias": None})
    model = Own()
    before = model.module.weight.detach().clone()
    with pytest.raises(ConfigError, match=r"lacks 'scale', 'module.bias' .*strict=False"):
        atoll.load_model(path, model)
    assert torch.equal(model.module.weight, before), "nothing is loaded by half"
    assert {"scale", "module.bias"} <= set(atoll.load_model(path, model, strict=False).missing)
    saved(path, extra=torch.zeros(2))
    with pytest.raises(ConfigError, match="has 'extra', which this Own does not have"):
        atoll.load_model(path, Own())
    assert atoll.load_model(path, Own(), strict=False).unexpected == ("extra",)


def test_other_shapes_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    saved(path, **{"module.weight": torch.zeros(4, 5)})
    model = Own()
    before = model.blocks[0].weight.detach().clone()
    with pytest.raises(ConfigError, match=r"'module.weight' is shaped \[4, 5\] .* and \[4, 4\] in the module"):
        atoll.load_model(path, model, strict=False)
    assert torch.equal(model.blocks[0].weight, before)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PayloadError, match="atoll export"):
        atoll.load_model(path, model)
    with pytest.raises(FileNotFoundError):
        atoll.load_model(tmp_path / "none.safetensors", model)
    with pytest.raises(ConfigError, match="is a folder; give the model"):
        atoll.load_model(tmp_path, model)  # safetensors: "No such device"
    with pytest.raises(ConfigError, match="a file and then a torch"):
        atoll.load_model(model, path)  # type: ignore[arg-type]


def test_what_a_learner_has_of_the_published_model_can_be_saved_and_loaded(tmp_path: Path) -> None:
    syncer = SyncerThread(SyncConfig(sync_every=4, fragments=2, codec_down="fp32", codec_up="fp32"))
    model = Own()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with pytest.raises(atoll.LocalProtocolError, match="joined"):
        atoll.Learner(model, optimizer, address=syncer.address).published_state_dict()
    with atoll.Learner(model, optimizer, address=syncer.address, learner_id="l") as learner:
        for _ in range(12):
            model.module.weight.data += 0.1
            learner.step(tokens=1)
        with learner.global_params():
            inside = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
            published = learner.published_state_dict()
        model.module.weight.data += 1.0
        assert all(torch.equal(published[name], inside[name]) for name in inside), "copies"
    syncer.stop()
    assert published.keys() == inside.keys() and published["scale"].shape == ()
    save_file(learner.published_state_dict(), tmp_path / "mine.safetensors")
    other = Own()
    assert atoll.load_model(tmp_path / "mine.safetensors", other).unexpected == ()
