"""Optimizer state cut anew for another mesh, and files of several ranks found again; without ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from atoll.errors import PayloadError
from atoll.learner.buffers import read_buffers
from atoll.learner.checkpoint import CheckpointFile
from atoll.learner.checkpoint_sets import find_sets
from atoll.learner.inner import InnerAbout, capture, load_saved, pack, places_of, reshard, target_of, unpack
from atoll.learner.inner.places import HeldPart, copy_common, from_json, to_json
from atoll.learner.inner_recovery import InnerRecovery
from atoll.learner.inner_state import BUFFERS
from atoll.learner.view import RunView
from atoll.observe import NullWriter

ABOUT = InnerAbout("l", "r", 1, 12, (3, 3), 96)


def about(**changes: Any) -> InnerAbout:
    return replace(ABOUT, **changes)


def stepped(optimizer_class: Any = torch.optim.AdamW, **given: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    net = nn.Linear(7, 10)
    optimizer = optimizer_class(net.parameters(), **given)
    for _ in range(3):
        net(torch.randn(4, 7)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def names(net: nn.Module) -> Any:
    return lambda: {id(parameter): name for name, parameter in net.named_parameters()}


def rows(captured: Any, ranks: int) -> list[Any]:
    """The state as ranks with rows of every parameter would have written it."""
    parts = []
    for rank in range(ranks):
        places, tensors = [], dict(captured.tensors)
        for i, place in enumerate(captured.places[0]):
            low, high = place.shape[0] * rank // ranks, place.shape[0] * (rank + 1) // ranks
            places.append(replace(place, held=(((low, high),), *place.held[1:])))
            for key in ("exp_avg", "exp_avg_sq"):
                name = next(n for n in tensors if n.endswith(f"state.{i}.{key}"))
                tensors[name] = tensors[name][low:high].clone()
        parts.append(replace(captured, tensors=tensors, places=[places]))
    return parts


def test_what_two_places_have_in_common_is_copied_and_nothing_else() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        shape = tuple(int(n) for n in random.integers(1, 9, random.integers(0, 4)))
        whole = torch.from_numpy(random.standard_normal(shape))
        held = []
        for _side in range(2):
            chosen = [np.flatnonzero(random.random(size) < 0.6) for size in shape]
            held.append([(c, tuple((int(i), int(i) + 1) for i in c)) for c in chosen])
        mine, theirs = (HeldPart("w", "float64", shape, tuple(ranges for _, ranges in side)) for side in held)
        index = [np.ix_(*[c for c, _ in side]) if shape else () for side in held]
        target = torch.full(mine.local_shape, -99.0, dtype=torch.float64)
        count = copy_common(target, mine, whole[index[1]], theirs)
        common = torch.zeros(shape, dtype=torch.bool)
        common[index[0]] = True
        other = torch.zeros(shape, dtype=torch.bool)
        other[index[1]] = True
        expected = torch.where(common & other, whole, torch.full_like(whole, -99.0))[index[0]]
        assert torch.equal(target, expected) and count == int((common & other).sum())


@pytest.mark.parametrize("ranks", [1, 2, 3, 16])
def test_parts_of_any_number_of_ranks_are_the_whole_state(ranks: int) -> None:
    """16 ranks, and 7 or 10 rows: some have nothing."""
    net, optimizer = stepped()
    captured = capture(optimizer, {}, ABOUT, places=places_of(optimizer, names(net)))
    parts = [unpack(pack(part)) for part in rows(captured, ranks)]
    other = nn.Linear(7, 10)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    load_saved(reshard(parts, target_of(fresh, names(other))), fresh)
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == fresh.state[theirs].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, fresh.state[theirs][key]), key
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_what_cannot_be_cut_anew_is_said_by_name() -> None:
    net, optimizer = stepped()
    captured = capture(optimizer, {}, ABOUT, places=places_of(optimizer, names(net)))
    halves = rows(captured, 2)
    target = target_of(optimizer, names(net))
    with pytest.raises(PayloadError, match="do not add up to exp_avg of 'weight'"):
        reshard(halves[:1], target)
    with pytest.raises(PayloadError, match="state of a AdamW, the optimizer is a SGD"):
        reshard(halves, target_of(torch.optim.SGD(net.parameters()), names(net)))
    with pytest.raises(PayloadError, match="an older release wrote it"):
        reshard([replace(captured, places=None)], target)
    renamed = {id(net.weight): "other", id(net.bias): "bias"}
    with pytest.raises(PayloadError, match="no parameter 'other'"):
        reshard(halves, target_of(optimizer, lambda: renamed))
    split = torch.optim.AdamW([{"params": [net.weight], "lr": 1.0}, {"params": [net.bias], "lr": 2.0}])
    lone = capture(split, {}, ABOUT, places=places_of(split, names(net)))
    with pytest.raises(PayloadError, match="groups are other ones"):
        reshard([lone], target)
    other, factored = stepped(torch.optim.Adafactor)
    saved = capture(factored, {}, ABOUT, places=places_of(factored, names(other)))
    wanted = target_of(factored, names(other))
    reshard([saved], wanted)  # whole on both sides
    cut = replace(wanted.places[0][0], held=(((0, 5),), ((0, 7),)))
    with pytest.raises(PayloadError, match="not shaped like its parameter"):
        reshard([saved], replace(wanted, places=[[cut, wanted.places[0][1]]]))


def test_a_manifest_that_is_wrong_is_refused() -> None:
    net, optimizer = stepped()
    places = places_of(optimizer, names(net))
    assert places is not None and from_json(to_json(places)) == places
    good = ["w", "float32", [4], [[[0, 2], [3, 4]]]]
    from_json([[good]])
    bad: list[Any] = [[[3, 2]]], [[[0, 5]]], [[[-1, 2]]], [[["0", 2]]], [[[0, 1, 2]]], [], [[[2, 4], [0, 1]]]
    for held in bad:
        with pytest.raises((ValueError, TypeError)):
            from_json([[[*good[:3], held]]])
    for entry in (["w", "float32", [-4], [[]]], ["w", 3, [4], [[]]], ["w", "float32", ["4"], [[]]], 7, [good]):
        with pytest.raises((ValueError, TypeError)):
            from_json([[entry]])


def write(folder: Path, size: int, captured: Any, **changes: Any) -> list[Path]:
    parts = rows(captured, size) if size > 1 else [captured]
    files = [CheckpointFile(folder, "l", f"rank-{r}-of-{size}" if size > 1 else "") for r in range(size)]
    one = about(**changes)
    return [file.write(replace(part, about=one)).file for file, part in zip(files, parts, strict=True)]


def recovered(folder: Path, net: nn.Module, optimizer: Any) -> InnerRecovery:
    view = RunView("l")
    view.run = "r"
    inner = InnerRecovery(optimizer, {}, folder, 60.0, view, NullWriter(), names=names(net))
    assert not inner.look()
    return inner


def test_the_newest_checkpoint_counts_however_many_ranks_wrote_it(tmp_path: Path) -> None:
    """Two ranks, then one process, then three ranks of the next generation, whose newest is damaged."""
    net, optimizer = stepped()
    captured = capture(optimizer, {}, ABOUT, places=places_of(optimizer, names(net)))
    write(tmp_path, 2, captured, step=40)
    write(tmp_path, 1, captured, step=12, generation=2)
    write(tmp_path, 3, captured, step=20, generation=3)
    torn = write(tmp_path, 3, captured, step=30, generation=3)
    write(tmp_path, 5, captured, step=99, run="another", generation=9)
    assert [one.key for one in find_sets(tmp_path, "l", "r")] == [(3, 30, 3), (3, 20, 3), (2, 12, 1), (1, 40, 2)]
    inner = recovered(tmp_path, net, torch.optim.AdamW(net.parameters()))
    assert inner.restore_own() and inner.detail == "of step 30, generation 3, which 3 ranks wrote"
    raw = bytearray(torn[1].read_bytes())
    raw[-1] ^= 1
    torn[1].write_bytes(raw)
    fresh = torch.optim.AdamW(net.parameters())
    inner = recovered(tmp_path, net, fresh)
    assert inner.restore_own() and inner.detail == "of step 20, generation 3, which 3 ranks wrote"
    assert torch.equal(fresh.state[net.weight]["exp_avg"], optimizer.state[net.weight]["exp_avg"])
    torn[2].unlink()
    assert next(one.key for one in find_sets(tmp_path, "l", "r")) == (3, 20, 3), "a set that lacks a rank is none"


def test_state_of_ranks_that_does_not_fit_is_said_and_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    net, optimizer = stepped()
    captured = capture(optimizer, {}, ABOUT, places=places_of(optimizer, names(net)))
    write(tmp_path, 2, captured)
    fresh = torch.optim.SGD(net.parameters(), momentum=0.9)
    inner = recovered(tmp_path, net, fresh)
    assert not inner.restore_own() and "state of a AdamW, the optimizer is a SGD" in inner.detail
    assert not fresh.state


def test_buffers_of_an_island_are_found_for_an_export(tmp_path: Path) -> None:
    class Kept:
        def __init__(self, **state: Any) -> None:
            self.state_dict = lambda: state

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...

    for rank in range(2):
        mean = torch.full((3,), float(rank))
        kept = Kept(mean=mean) if rank == 0 else Kept(mean=mean, other=mean)
        CheckpointFile(tmp_path, "l", f"rank-{rank}-of-2").write(capture(None, {BUFFERS: kept}, ABOUT))
    for whose in ("l", "mean"):
        found, told = read_buffers(tmp_path, whose, "r")
        assert {name: value.tolist() for name, value in found.items()} == {"mean": [0.0] * 3, "other": [1.0] * 3}
        assert told == ["buffers are those of l at its step 12"]
