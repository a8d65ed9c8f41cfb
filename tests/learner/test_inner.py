"""The inner state of a learner: continuation bit for bit, every structure, and all that may be wrong with bytes."""

from __future__ import annotations

import json
import math
import random
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from atoll.errors import ConfigError, PayloadError
from atoll.learner.inner import (
    Captured,
    InnerAbout,
    capture,
    limits,
    pack,
    restore,
    restore_optimizer_only,
    size_of,
    unpack,
)
from atoll.zoo.optim import CombinedOptimizer

ABOUT = InnerAbout(learner="l0", run="r", generation=2, step=7, bases=(3, 4, -1), tokens=2**40)
Maker = Callable[[nn.Module], Any]

OPTIMIZERS: dict[str, Maker] = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "adamw fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "adamw tensor lr": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "groups": lambda model: torch.optim.AdamW(
        [{"params": [p], "lr": 10.0**-i} for i, p in enumerate(model.parameters(), 1)], betas=(0.8, 0.9)
    ),
    "combined": lambda model: CombinedOptimizer(
        torch.optim.SGD([p for p in model.parameters() if p.dim() == 2], lr=1e-2, momentum=0.9),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-3),
    ),
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda model: CombinedOptimizer(
        torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=1e-2),
        torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-3),
    )


class Holder:
    """An extra that holds one value."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self.value = state_dict["value"]


def make_model(seed: int = 0, width: int = 8, device: str = "cpu") -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 1)).to(device)


def train(model: nn.Module, optimizer: Any, steps: int, *, schedule: Any = None) -> None:
    """Data from all three generators, dropout from torch's: continuing needs every one of them."""
    device = next(model.parameters()).device
    for _ in range(steps):
        batch = torch.from_numpy(np.random.standard_normal((16, 4)).astype(np.float32)).to(device)
        loss = (model(batch) - random.random()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def same(one: nn.Module, two: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def through_bytes(captured: Captured) -> Captured:
    return unpack(pack(captured))


def copy_of(model: nn.Module, **options: Any) -> nn.Module:
    fresh = make_model(99, **options)
    fresh.load_state_dict(model.state_dict())
    return fresh


# ---------------------------------------------------------------- continuation


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("before", [0, 5])
def test_training_continues_bit_for_bit(kind: str, before: int) -> None:
    seed_all(1)
    model = make_model()
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, before)
    fresh = copy_of(model)
    captured = capture(optimizer, {}, ABOUT)
    train(model, optimizer, 6)

    captured = through_bytes(captured)
    seed_all(2)
    again = OPTIMIZERS[kind](fresh)
    assert restore(captured, again, {}, rng=True) == []
    train(fresh, again, 6)
    assert same(model, fresh)
    assert not same(model, make_model())


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
    "milestones": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 7, 9]),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [4]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_extras(kind: str) -> None:
    seed_all(1)
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model)
    schedule = SCHEDULES[kind](optimizer)
    train(model, optimizer, 6, schedule=schedule)
    fresh = copy_of(model)
    captured = capture(optimizer, {"schedule": schedule}, ABOUT)
    train(model, optimizer, 8, schedule=schedule)

    again = OPTIMIZERS["adamw"](fresh)
    schedule_again = SCHEDULES[kind](again)
    assert restore(through_bytes(captured), again, {"schedule": schedule_again}, rng=True) == []
    assert isinstance(schedule_again.state_dict(), dict)
    train(fresh, again, 8, schedule=schedule_again)
    assert same(model, fresh) and again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_a_capture_stays_as_it_was_while_training_goes_on() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 3)
    captured = capture(optimizer, {"model": model}, ABOUT)
    frozen = bytes(pack(captured))
    train(model, optimizer, 3)
    assert bytes(pack(captured)) == frozen
    restore(captured, optimizer, {"model": model}, rng=False)
    train(model, optimizer, 3)
    assert bytes(pack(captured)) == frozen, "restoring must hand out copies, not the capture's own tensors"


def test_memory_of_an_old_capture_is_used_again() -> None:
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 1)
    first = capture(optimizer, {}, ABOUT)
    places = {name: tensor.data_ptr() for name, tensor in first.tensors.items() if name.startswith("optimizer")}
    train(model, optimizer, 1)
    expected = bytes(pack(capture(optimizer, {}, ABOUT)))
    second = capture(optimizer, {}, ABOUT, reuse=first)
    assert bytes(pack(second)) == expected
    assert places and all(second.tensors[name].data_ptr() == place for name, place in places.items())


def test_memory_that_does_not_fit_is_not_used() -> None:
    first = capture(None, {"x": Holder(torch.zeros(3))}, ABOUT, rng=False)
    for other in (torch.ones(4), torch.ones(3, dtype=torch.float64), torch.ones(3, 1)):
        again = Holder()
        assert restore(capture(None, {"x": Holder(other)}, ABOUT, reuse=first), None, {"x": again}, rng=False) == []
        assert same_value(again.value, other)


def test_fp32_moments_of_bf16_parameters_keep_their_bits() -> None:
    value = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([value], lr=0.1, momentum=0.9)
    exact = torch.tensor([1.0001, 2.0003, 3.0005, 4.0007])
    optimizer.state[value]["momentum_buffer"] = exact.clone()
    again = torch.optim.SGD([value], lr=0.1, momentum=0.9)
    restore(through_bytes(capture(optimizer, {}, ABOUT)), again, {}, rng=False)
    assert torch.equal(again.state[value]["momentum_buffer"], exact)


# ---------------------------------------------------------------- structures

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


def same_value(one: Any, two: Any) -> bool:
    """Equal to the bit, and of the same types all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        equal = one.dtype == two.dtype and one.shape == two.shape
        return equal and bytes(raw_bytes(one)) == bytes(raw_bytes(two))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == two.dtype and np.shape(one) == np.shape(two) and one.tobytes() == two.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", two)
    if isinstance(one, dict):
        pairs = zip(one.items(), two.items(), strict=False)
        return len(one) == len(two) and all(same_value(a, b) for a, b in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same_value, one, two))
    return bool(one == two)


def raw_bytes(tensor: torch.Tensor) -> Any:
    return tensor.clone().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else np.zeros(0, np.uint8)


def from_raw(raw: Any, dtype: torch.dtype, shape: Any) -> torch.Tensor:
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.zeros(*shape, dtype=dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    values = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    raw = np.repeat(np.array(values, np.uint8), dtype.itemsize)
    return from_raw(raw, dtype, shape)


arrays = st.builds(
    lambda code, values: np.array(values).astype(code), st.sampled_from("?bBhHiIqQefdFD"), st.lists(st.integers(0, 100))
)
scalars = st.builds(lambda code, value: np.dtype(code).type(value), st.sampled_from("?bHiqefdD"), st.integers(0, 100))
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**200)
    | st.floats()
    | st.text()
    | st.text(st.characters(), max_size=5)
    | st.binary()
    | tensors()
    | arrays
    | scalars
    | st.sampled_from([torch.bfloat16, torch.int8])
)
keys = st.text(max_size=8) | st.integers(-5, 2**70)
structures = st.recursive(
    leaves,
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.lists(inside, max_size=4).map(tuple)
        | st.dictionaries(keys, inside, max_size=4)
        | st.dictionaries(keys, inside, max_size=4).map(OrderedDict)
        | st.dictionaries(keys, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(structures)
def test_every_structure_comes_back_exactly(value: Any) -> None:
    captured = capture(None, {"x": Holder(value)}, ABOUT, rng=False)
    blob = pack(captured)
    assert len(blob) == size_of(captured)
    for source in (blob, bytes(blob), memoryview(bytes(blob))):
        read = unpack(source)
        again = Holder()
        assert read.about == ABOUT and restore(read, None, {"x": again}, rng=False) == []
        assert same_value(again.value, value)
    safetensors.torch.load(bytes(blob))  # any reader of the format can open it


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3), (1, 1, 4)])
def test_tensors_of_any_type_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = np.random.default_rng(0).integers(0, 2, math.prod(shape) * dtype.itemsize, np.uint8)
    value = from_raw(raw, dtype, shape)
    again = Holder()
    restore(through_bytes(capture(None, {"x": Holder(value)}, ABOUT)), None, {"x": again}, rng=False)
    assert same_value(again.value, value)


def test_strides_views_and_sharing() -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    shared = torch.randn(3)
    value = {
        "channels last": image,
        "transposed": torch.randn(3, 4).t(),
        "complex transposed": torch.randn(3, 4, dtype=torch.complex64).t(),
        "every other": torch.arange(10)[::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "with gradient": nn.Parameter(torch.ones(2)),
        "empty from numpy": torch.from_numpy(np.zeros(0, np.complex64)),
        "shared": [shared, shared],
    }
    again = Holder()
    restore(through_bytes(capture(None, {"x": Holder(value)}, ABOUT)), None, {"x": again}, rng=False)
    for name, tensor in value.items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(again.value[name], tensor) and not again.value[name].requires_grad
    for name in ("channels last", "transposed", "complex transposed"):
        assert again.value[name].stride() == value[name].stride()  # type: ignore[attr-defined]
    assert again.value["shared"][0] is again.value["shared"][1]


class Odd(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": [1, {"b": object()}]}, r"extras\.x\.value\.a\.1\.b .*builtins\.object"),
        ({"a": {1, 2}}, r"extras\.x\.value\.a .*set"),
        ({1.5: 0}, "key 1.5"),
        ({True: 0}, "key True"),
        ({(1, 2): 0}, "key"),
        (Odd(a=1), "Odd"),
        (lambda: 0, "function"),
        (np.array(["text"]), "ndarray"),
        (np.array([None]), "ndarray"),
        (torch.ones(3).to_sparse(), "Tensor"),
        (torch.ones(3, device="meta"), "Tensor"),
        (b"x" * (2**20 + 1), "keep it as a tensor"),
    ],
)
def test_what_cannot_be_held_is_named_with_a_remedy(value: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=where):
        capture(None, {"x": Holder(value)}, ABOUT)


def test_a_cycle_and_a_flood_have_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError, match="no cycles"):
        capture(None, {"x": Holder(cycle)}, ABOUT)
    monkeypatch.setattr(limits, "NODES_MAX", 100)
    with pytest.raises(ConfigError, match="as tensors"):
        capture(None, {"x": Holder(list(range(101)))}, ABOUT, rng=False)
    monkeypatch.setattr(limits, "TENSORS_MAX", 3)
    with pytest.raises(ConfigError, match="more than 3 tensors"):
        capture(None, {"x": Holder([torch.ones(1) for _ in range(4)])}, ABOUT, rng=False)


# ---------------------------------------------------------------- bytes that are wrong


def good_blob() -> bytes:
    model = make_model()
    optimizer = OPTIMIZERS["adamw"](model)
    train(model, optimizer, 1)
    return bytes(pack(capture(optimizer, {"x": Holder((1, np.arange(3)))}, ABOUT)))


def with_header(blob: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    (length,) = struct.unpack_from("<Q", blob)
    header = json.loads(blob[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + blob[8 + length :]


def with_metadata(blob: bytes, **values: Any) -> bytes:
    return with_header(blob, lambda header: header["__metadata__"].update(values))


def with_tree(blob: bytes, node: Any, **branches: Any) -> bytes:
    """A blob whose only extra is `node`, taken as it is."""
    tree = {"optimizer": None, "extras": {"x": node}, "rng": None}
    return with_metadata(blob, structure=json.dumps({**tree, **branches}))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damaged_bytes_are_refused_or_harmless(data: st.DataObject) -> None:
    blob = bytearray(good_blob())
    if data.draw(st.booleans()):
        del blob[data.draw(st.integers(0, len(blob) - 1)) :]
        with pytest.raises(PayloadError):
            unpack(blob)
        return
    for _ in range(data.draw(st.integers(1, 8))):
        blob[data.draw(st.integers(0, min(len(blob), 20_000) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        captured = unpack(blob)
    except PayloadError:
        return
    model = make_model()
    try:
        restore(captured, OPTIMIZERS["adamw"](model), {"x": Holder()}, rng=False)
    except PayloadError:
        return


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: b"",
        lambda blob: b"\x00" * 8,
        lambda blob: b"\xff" * 100,
        lambda blob: struct.pack("<Q", 2) + b"[]" + blob[8:],
        lambda blob: struct.pack("<Q", 2) + b"{}" + blob[8:],
        lambda blob: blob + b"\0",
        lambda blob: with_metadata(blob, format="pt"),
        lambda blob: with_metadata(blob, version="2"),
        lambda blob: with_metadata(blob, version="one"),
        lambda blob: with_metadata(blob, about="{}"),
        lambda blob: with_metadata(blob, about=json.dumps({**ABOUT_JSON, "step": "7"})),
        lambda blob: with_metadata(blob, about=json.dumps({**ABOUT_JSON, "step": 2**63})),
        lambda blob: with_metadata(blob, about=json.dumps({**ABOUT_JSON, "bases": [1.5]})),
        lambda blob: with_metadata(blob, about=json.dumps({**ABOUT_JSON, "learner": "x" * 5000})),
        lambda blob: with_metadata(blob, about=json.dumps({**ABOUT_JSON, "more": 1})),
        lambda blob: with_metadata(blob, structure="[]"),
        lambda blob: with_metadata(blob, structure="[" * 100_000),
        lambda blob: with_metadata(blob, structure='{"optimizer": NaN, "extras": {}, "rng": null}'),
        lambda blob: with_header(blob, lambda header: header.pop("__metadata__")),
        lambda blob: with_header(blob, lambda header: header.popitem()),
        lambda blob: with_header(blob, lambda header: header.update(more={"dtype": "F32", "shape": [1]})),
        lambda blob: with_header(blob, lambda header: last(header).update(shape=[2**40, 2**40])),
        lambda blob: with_header(blob, lambda header: last(header).update(shape=[1] * 100)),
        lambda blob: with_header(blob, lambda header: last(header).update(shape=[-1])),
        lambda blob: with_header(blob, lambda header: last(header).update(dtype="F128")),
        lambda blob: with_header(blob, lambda header: last(header).update(data_offsets=[0, 4])),
        lambda blob: with_tree(blob, 1),  # tensors that nothing refers to
    ],
)
def test_blobs_of_a_wrong_form(change: Callable[[bytes], bytes]) -> None:
    unpack(good_blob())
    with pytest.raises(PayloadError, match="start without it"):
        unpack(change(good_blob()))


ABOUT_JSON = {"learner": "l0", "run": "r", "generation": 2, "step": 7, "bases": [3], "tokens": 1}


def last(header: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = header[next(reversed(header))]
    return entry


def deep(levels: int) -> Any:
    node: Any = 1
    for _ in range(levels):
        node = [node]
    return node


@pytest.mark.parametrize(
    "node",
    [
        {"tensor": "nothing"},
        {"tensor": 3},
        {"tensor": "t", "order": [0, 0]},
        {"tensor": "t", "order": [1, 0]},
        {"tensor": "t", "as": ["complex64", [5]]},
        {"tensor": "t", "as": ["qint8", [4]]},
        {"array": "t", "as": ["|O", [1]]},
        {"array": "t", "as": ["<f4", [7]]},
        {"pickle": "gASVAAAA"},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[None, 1]]},
        {"dict": [[["a"], 1]]},
        {"dict": {"a": 1}},
        {"counter": 5},
        {"tuple": 5},
        {"int": "xyz"},
        {"int": "f" * (2**21 + 10)},
        {"float": "00"},
        {"bytes": "0"},
        {"scalar": "00", "as": "|O"},
        {"scalar": "", "as": "<f4"},
        {"dtype": "nothing"},
        {},
        deep(40),
    ],
)
def test_trees_of_a_wrong_form(node: Any) -> None:
    blob = bytes(pack(Captured({"t": torch.ones(1)}, {"optimizer": None, "extras": {}, "rng": None}, ABOUT)))
    unpack(with_tree(blob, {"tensor": "t"}))
    with pytest.raises(PayloadError, match="start without it"):
        unpack(with_tree(blob, [{"tensor": "t"}, node]))


@pytest.mark.parametrize(
    "branches",
    [
        {"optimizer": 5},
        {"optimizer": {"dict": [["state", 1]]}},
        {"extras": []},
        {"rng": 5},
        {"rng": {"dict": [["python", None]]}},
        {"rng": {"dict": [["python", 1], ["numpy", 1], ["torch", 1], ["cuda", {"dict": [["zero", 1]]}]]}},
        {"rng": {"dict": [["python", 1], ["numpy", 1], ["torch", 1], ["cuda", [0]]]}},
        {"more": None},
    ],
)
def test_branches_of_a_wrong_form(branches: dict[str, Any]) -> None:
    blob = bytes(pack(capture(None, {}, ABOUT, rng=False)))
    unpack(with_tree(blob, 1))
    with pytest.raises(PayloadError, match="start without it"):
        unpack(with_tree(blob, 1, **branches))


@pytest.mark.parametrize(
    "state",
    [
        5,
        {"state": {}, "param_groups": []},
        {"state": {}, "param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{}]},
        {"state": [], "param_groups": [{"params": [0, 1, 2, 3]}]},
        {"state": {0: {"exp_avg": 1}}, "param_groups": 7},
    ],
)
def test_optimizer_states_of_a_wrong_form_are_refused(state: Any) -> None:
    _, own = trained("adamw")
    before = bytes(pack(capture(own, {}, ABOUT, rng=False)))

    class Forged(torch.optim.AdamW):
        def state_dict(self) -> Any:
            return state

    Forged.__name__ = "AdamW"
    captured = through_bytes(capture(Forged(make_model(3).parameters()), {}, ABOUT, rng=False))
    with pytest.raises(PayloadError):
        restore(captured, own, {}, rng=False)
    with pytest.raises(PayloadError):
        restore_optimizer_only(captured, own)
    assert bytes(pack(capture(own, {}, ABOUT, rng=False))) == before


def test_too_many_nodes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = bytes(pack(capture(None, {"x": Holder(list(range(200)))}, ABOUT, rng=False)))
    monkeypatch.setattr(limits, "NODES_MAX", 150)
    with pytest.raises(PayloadError, match="too large"):
        unpack(blob)


def test_a_header_left_unaligned_by_another_writer_is_read() -> None:
    captured = capture(None, {"x": Holder(torch.arange(5, dtype=torch.float64))}, ABOUT, rng=False)
    blob = bytes(pack(captured))
    (length,) = struct.unpack_from("<Q", blob)
    for spaces in range(8):
        moved = struct.pack("<Q", length + spaces) + blob[8 : 8 + length] + b" " * spaces + blob[8 + length :]
        again = Holder()
        restore(unpack(bytearray(moved)), None, {"x": again}, rng=False)
        assert torch.equal(again.value, torch.arange(5, dtype=torch.float64))


# ---------------------------------------------------------------- what does not fit


def trained(kind: str, width: int = 8) -> tuple[nn.Module, Any]:
    model = make_model(3, width)
    optimizer = OPTIMIZERS[kind](model)
    train(model, optimizer, 2)
    return model, optimizer


@pytest.mark.parametrize("put", ["all", "optimizer only"])
@pytest.mark.parametrize(
    ("kind", "width", "names"),
    [
        ("adamw", 9, "parameter 0 .*9, 4.*8, 4"),
        ("sgd momentum", 8, "AdamW.*SGD"),
        ("groups", 8, "groups"),
        ("combined", 8, "CombinedOptimizer"),
    ],
)
def test_an_optimizer_that_does_not_fit_is_left_alone(put: str, kind: str, width: int, names: str) -> None:
    captured = through_bytes(capture(trained("adamw")[1], {}, ABOUT))
    _, other = trained(kind, width)
    before = bytes(pack(capture(other, {}, ABOUT, rng=False)))
    with pytest.raises(PayloadError, match=names):
        if put == "all":
            restore(captured, other, {}, rng=True)
        else:
            restore_optimizer_only(captured, other)
    assert bytes(pack(capture(other, {}, ABOUT, rng=False))) == before


def test_other_dtypes_do_not_fit() -> None:
    captured = capture(trained("adamw")[1], {}, ABOUT)
    with pytest.raises(PayloadError, match="bfloat16"):
        restore(captured, OPTIMIZERS["adamw"](make_model().bfloat16()), {}, rng=False)


def test_moments_of_a_wrong_shape_are_refused_before_they_break_a_step() -> None:
    _, optimizer = trained("adamw")
    entry = next(iter(optimizer.state.values()))
    entry["exp_avg"] = torch.zeros(5)
    captured = through_bytes(capture(optimizer, {}, ABOUT))
    with pytest.raises(PayloadError, match="exp_avg"):
        restore(captured, trained("adamw")[1], {}, rng=False)


def test_a_state_that_the_optimizer_refuses_changes_nothing() -> None:
    class Picky(torch.optim.SGD):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            if state_dict["param_groups"][0]["lr"] == 0.25:
                raise ArithmeticError("I do not like this rate")

    def both(lr: float) -> CombinedOptimizer:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
        for param in params:
            param.grad = torch.full((2,), lr)
        optimizer = CombinedOptimizer(
            torch.optim.SGD([params[0]], lr=lr, momentum=0.9), Picky([params[1]], lr=lr, momentum=0.9)
        )
        optimizer.step()
        return optimizer

    captured, own = capture(both(0.25), {}, ABOUT), both(0.5)
    before = bytes(pack(capture(own, {}, ABOUT, rng=False)))
    with pytest.raises(PayloadError, match="I do not like"):
        restore(captured, own, {}, rng=False)
    assert bytes(pack(capture(own, {}, ABOUT, rng=False))) == before


def test_what_could_not_be_restored_is_named() -> None:
    class Broken(Holder):
        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            raise KeyError("position")

    captured = capture(None, {"old": Holder(1), "data": Broken(2), "kept": Holder(3)}, ABOUT, rng=False)
    kept = Holder()
    lost = restore(
        through_bytes(captured), trained("sgd")[1], {"new": Holder(), "data": Broken(), "kept": kept}, rng=True
    )
    assert [line.split(":")[0] for line in lost] == ["optimizer", "data", "new", "old", "random numbers"]
    assert "KeyError" in lost[1] and kept.value == 3
    assert restore(capture(trained("sgd")[1], {}, ABOUT), None, {}, rng=False)[0].startswith(
        "optimizer: none was given"
    )


def test_random_numbers_are_restored_only_when_asked() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    seed_all(5)
    random.gauss(0, 1)  # leaves a cached second value behind, as np's does
    np.random.standard_normal()
    captured = through_bytes(capture(None, {}, ABOUT))
    expected = draw()
    seed_all(6)
    other = draw()
    seed_all(6)
    restore(captured, None, {}, rng=False)
    assert draw() == other
    restore(captured, None, {}, rng=True)
    assert draw() == expected


def test_random_states_that_do_not_fit_are_named() -> None:
    captured = capture(None, {}, ABOUT)
    name = captured.structure["rng"]["dict"][2][1]["tensor"]
    captured.tensors[name] = captured.tensors[name][:10].clone()
    captured.structure["rng"]["dict"][3][1] = {"dict": [[99, {"tensor": name}]]}
    lost = restore(captured, None, {}, rng=True)
    assert [line.split(":")[0] for line in lost] == ["random numbers of cuda", "random numbers of torch"]


# ---------------------------------------------------------------- a peer's state


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_peers_moments_are_taken_but_not_its_settings(kind: str) -> None:
    peer_model, peer = trained(kind)
    fresh = copy_of(peer_model)
    own = OPTIMIZERS[kind](fresh)
    for group in own.param_groups:
        group["lr"], group["mine"] = group["lr"] * 0.5, (1, "a")
    settings_before = [{k: v for k, v in group.items() if k != "params"} for group in own.param_groups]
    extra, random_before = Holder("mine"), random.getstate()
    captured = through_bytes(capture(peer, {"x": Holder("theirs")}, ABOUT))
    restore_optimizer_only(captured, own)
    assert [{k: v for k, v in group.items() if k != "params"} for group in own.param_groups] == settings_before
    assert extra.value == "mine" and random.getstate() == random_before
    theirs = {str(i): peer.state.get(p, {}) for i, p in enumerate(peer_model.parameters())}
    ours = {str(i): own.state.get(p, {}) for i, p in enumerate(fresh.parameters())}
    assert same_value(ours, theirs)
    train(fresh, own, 2)


def test_a_peers_state_must_be_finite_and_there() -> None:
    _, peer = trained("adamw")
    _, own = trained("adamw")
    before = bytes(pack(capture(own, {}, ABOUT, rng=False)))
    next(iter(peer.state.values()))["exp_avg_sq"][0] = math.inf
    with pytest.raises(PayloadError, match="exp_avg_sq is not finite"):
        restore_optimizer_only(through_bytes(capture(peer, {}, ABOUT)), own)
    with pytest.raises(PayloadError, match="no optimizer state"):
        restore_optimizer_only(through_bytes(capture(None, {}, ABOUT)), own)
    assert bytes(pack(capture(own, {}, ABOUT, rng=False))) == before


# ---------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["adamw", "adamw fused", "capturable", "sgd momentum", "muon", "combined"])
def test_training_on_a_gpu_continues_bit_for_bit(kind: str) -> None:
    def make(model: nn.Module) -> Any:
        if kind == "capturable":
            lr = torch.tensor(1e-2, device="cuda")
            return torch.optim.AdamW(model.parameters(), lr=lr, capturable=True)
        return OPTIMIZERS[kind](model)

    seed_all(1)
    model = make_model(device="cuda")
    optimizer = make(model)
    train(model, optimizer, 3)
    old = capture(optimizer, {}, ABOUT)
    train(model, optimizer, 3)
    fresh = copy_of(model, device="cuda")
    captured = capture(optimizer, {}, ABOUT, reuse=old)  # the pinned memory of the first, written over
    train(model, optimizer, 6)

    moments = [t for name, t in captured.tensors.items() if name.endswith(("exp_avg", "momentum_buffer"))]
    assert moments and all(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in moments)
    captured = through_bytes(captured)
    seed_all(2)
    again = make(fresh)
    assert restore(captured, again, {}, rng=True) == []
    assert all(group["lr"].is_cuda for group in again.param_groups if isinstance(group["lr"], torch.Tensor))
    train(fresh, again, 6)
    assert same(model, fresh)
