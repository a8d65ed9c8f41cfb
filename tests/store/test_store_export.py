"""The model out of the state: by parameter name, bit for bit, loadable with plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.errors import ConfigError, StoreError
from atoll.store import LoadedFragment, SnapshotTarget, export_model, load_snapshot, open_store, read_state

SPECS = [
    TensorSpec("embedding.weight", (300, 40), "bfloat16", "mean"),
    TensorSpec("block.0.weight", (40, 120), "float32", "rda"),
    TensorSpec("block.0.bias", (120,), "float16", "rda"),
    TensorSpec("scale", (), "float32", "rda"),
]
FRAGMENTS = 3
ROWS: dict[str, Any] = {
    "run": {"tensors": [[s.name, list(s.shape), s.dtype, s.merge] for s in SPECS], "fragments": FRAGMENTS}
}


@pytest.fixture
def model() -> dict[str, NDArray[np.float32]]:
    generator = np.random.default_rng(1)
    return {spec.name: np.asarray(generator.standard_normal(spec.shape), np.float32) for spec in SPECS}


@pytest.fixture
def fragments(model: dict[str, NDArray[np.float32]]) -> dict[int, LoadedFragment]:
    layout = build_layout(SPECS, FRAGMENTS)
    found = {}
    for fragment in layout.fragments:
        theta = np.zeros(fragment.size, np.float32)
        for piece in fragment.slices:
            flat = model[SPECS[piece.tensor].name].reshape(-1)
            theta[piece.offset : piece.offset + piece.size] = flat[piece.start : piece.stop]
        found[fragment.index] = LoadedFragment(10 + fragment.index, {}, {"theta": theta, "momentum": theta * 0})
    return found


def test_a_run_and_a_snapshot_export_the_same_model(
    tmp_path: Path, model: dict[str, NDArray[np.float32]], fragments: dict[int, LoadedFragment]
) -> None:
    target = SnapshotTarget(str(tmp_path / "snapshots"))
    draft = target.begin(0)
    with open_store(tmp_path / "state") as store:
        store.remember(ROWS)
        for index, fragment in fragments.items():
            store.commit(index, fragment.version, fragment.arrays, {})
            draft.put_fragment(index, fragment.version, fragment.arrays, {})
        store.sync()
        draft.finish(store.rows(), {})
        live = read_state(tmp_path / "state", only=["theta"])  # the run goes on
        export_model(live.rows, live.fragments, tmp_path / "live.safetensors")
    snapshot = load_snapshot(str(tmp_path / "snapshots"))
    export_model(snapshot.rows, snapshot.fragments, tmp_path / "snapshot.safetensors")
    assert (tmp_path / "live.safetensors").read_bytes() == (tmp_path / "snapshot.safetensors").read_bytes()
    found = load_file(tmp_path / "live.safetensors")
    assert sorted(found) == sorted(model)
    for name, tensor in model.items():
        assert found[name].dtype == np.float32 and found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes()
    with safe_open(tmp_path / "live.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "atoll_versions": "10,11,12"}
    assert not list(tmp_path.glob("*.tmp"))


def test_torch_loads_it_in_every_type(
    tmp_path: Path, model: dict[str, NDArray[np.float32]], fragments: dict[int, LoadedFragment]
) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    own = {spec.name: getattr(torch, spec.dtype) for spec in SPECS}
    for dtype in ("float32", "bfloat16", "float16", "own"):
        path = tmp_path / f"{dtype}.safetensors"
        export_model(ROWS, fragments, path, dtype=dtype)
        found = load_torch(path)
        for name, tensor in model.items():
            kind = own[name] if dtype == "own" else getattr(torch, dtype)
            assert found[name].dtype == kind
            assert torch.equal(found[name], torch.from_numpy(tensor.reshape(-1)).to(kind).reshape(tensor.shape))


def test_what_is_missing_is_said(tmp_path: Path, fragments: dict[int, LoadedFragment]) -> None:
    to = tmp_path / "model.safetensors"
    with pytest.raises(StoreError, match="does not say which parameters"):
        export_model({}, fragments, to)
    with pytest.raises(ConfigError, match="use one of these"):
        export_model(ROWS, fragments, to, dtype="int3")
    damaged = dict(fragments)
    damaged[1] = LoadedFragment(1, {}, {"theta": fragments[1].arrays["theta"][:-256]})
    with pytest.raises(StoreError, match="belongs to another model"):
        export_model(ROWS, damaged, to)
    del damaged[1]
    with pytest.raises(StoreError, match="fragment 1 of 3 is missing"):
        export_model(ROWS, damaged, to)
    assert list(tmp_path.iterdir()) == []
