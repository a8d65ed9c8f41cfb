"""The model out of what is on disk: state first, then snapshots; loadable with plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.errors import AtollError, ConfigError, LaunchError, StoreError
from atoll.launch.config import resolved, train_config
from atoll.launch.export import export_run
from atoll.launch.folder import RunFolder
from atoll.learner.buffers import BUFFERS, KeptBuffers
from atoll.learner.checkpoint import CheckpointFile
from atoll.learner.inner import InnerAbout, capture
from atoll.store import SnapshotTarget, open_store

FRAGMENTS = 3


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 24), nn.Linear(24, 50))


def in_pieces(source: nn.Module) -> tuple[dict[str, Any], list[np.ndarray[Any, Any]]]:
    """The rows that describe a model, and its parameters as the syncer keeps them."""
    named = [(name, parameter.detach().numpy()) for name, parameter in source.named_parameters()]
    specs = [TensorSpec(name, tuple(array.shape), "float32", "rda") for name, array in named]
    layout = build_layout(specs, FRAGMENTS)
    flat = {spec.name: array.reshape(-1) for spec, (_, array) in zip(specs, named, strict=True)}
    thetas = []
    for fragment in layout.fragments:
        theta = np.zeros(fragment.size, np.float32)
        for piece in fragment.slices:
            part = flat[layout.tensors[piece.tensor].name][piece.start : piece.stop]
            theta[piece.offset : piece.offset + piece.size] = part
        thetas.append(theta)
    tensors = [[s.name, list(s.shape), s.dtype, s.merge] for s in layout.tensors]
    return {"run": {"format": 1, "run": "r", "tensors": tensors, "fragments": FRAGMENTS}}, thetas


def write_state(path: Path, source: nn.Module, version: int = 7) -> None:
    rows, thetas = in_pieces(source)
    with open_store(path) as store:
        store.remember(rows)
        store.sync()
        for index, theta in enumerate(thetas):
            store.commit(index, version + index, {"theta": theta, "momentum": np.zeros_like(theta)}, {})


def write_snapshot(url: str, source: nn.Module, label: int, *, finish: bool = True) -> None:
    rows, thetas = in_pieces(source)
    draft = SnapshotTarget(url, keep=9).begin(label)
    for index, theta in enumerate(thetas):
        draft.put_fragment(index, 3, {"theta": theta}, {})
    if finish:
        draft.finish(rows, {})


def equal(path: Path, source: nn.Module) -> bool:
    """Load the file into a module of the same shape, as a user would, and compare every parameter."""
    other = model(99)
    other.load_state_dict(load_file(path))
    return all(torch.equal(a, b) for a, b in zip(other.parameters(), source.parameters(), strict=True))


def write_buffers(folder: Path, learner: str, value: float, run: str = "r") -> None:
    """A learner's checkpoint with statistics in it, as InnerRecovery writes them."""
    norm = nn.BatchNorm1d(4)
    norm.running_mean.fill_(value)  # type: ignore[union-attr]
    norm.num_batches_tracked.fill_(int(value))  # type: ignore[union-attr]
    kept = KeptBuffers(nn.ModuleDict({"norm": norm}))
    about = InnerAbout(learner, run, 1, 50, (1, 2, 3), 100)
    CheckpointFile(folder, learner).write(capture(None, {BUFFERS: kept}, about))


def run_folder(path: Path, **settings: Any) -> RunFolder:
    path.mkdir(parents=True)
    config, _ = train_config({"model": "nano", **settings})
    folder = RunFolder(path)
    folder.write_config(config.options(), resolved(config))
    return folder


def test_the_state_of_a_run_gives_the_model_to_plain_torch(tmp_path: Path) -> None:
    folder, source = run_folder(tmp_path / "run"), model(1)
    write_state(folder.state, source)
    done = export_run(str(folder.path), tmp_path / "model.safetensors")
    assert equal(tmp_path / "model.safetensors", source)
    assert done.parameters == sum(parameter.numel() for parameter in source.parameters())
    assert (done.tensors, done.versions, done.problems) == (7, (7, 8, 9), ())
    assert done.source == str(folder.state)
    # The state alone does as well, and so does a run whose settings are lost.
    export_run(str(folder.state), tmp_path / "again.safetensors")
    folder.config_file.unlink()
    export_run(str(folder.path), tmp_path / "more.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / "more.safetensors").read_bytes()


def test_other_types_are_rounded(tmp_path: Path) -> None:
    folder, source = run_folder(tmp_path / "run"), model(2)
    write_state(folder.state, source)
    export_run(str(folder.path), tmp_path / "model.safetensors", dtype="bfloat16")
    loaded = load_file(tmp_path / "model.safetensors")
    for name, parameter in source.named_parameters():
        assert torch.equal(loaded[name], parameter.detach().to(torch.bfloat16))


def test_snapshots_by_folder_or_one_by_name(tmp_path: Path) -> None:
    old, new = model(3), model(4)
    url = (tmp_path / "snapshots").as_uri()
    write_snapshot(url, old, 1)
    write_snapshot(url, new, 2)
    write_snapshot(url, model(5), 3, finish=False)
    done = export_run(url, tmp_path / "newest.safetensors")
    assert equal(tmp_path / "newest.safetensors", new)
    assert done.source.endswith("snapshot-00000002") and len(done.problems) == 1
    export_run(str(tmp_path / "snapshots" / "snapshot-00000001"), tmp_path / "first.safetensors")
    assert equal(tmp_path / "first.safetensors", old)


def test_a_damaged_state_falls_back_to_the_runs_snapshots_and_says_so(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", snapshots=(tmp_path / "snapshots").as_uri())
    write_state(folder.state, model(6))
    write_snapshot((tmp_path / "snapshots").as_uri(), model(7), 1)
    [*_, slots] = sorted(folder.state.rglob("fragment-*.slots"))
    slots.write_bytes(bytes(slots.stat().st_size))
    done = export_run(str(folder.path), tmp_path / "model.safetensors")
    assert equal(tmp_path / "model.safetensors", model(7))
    assert any("state:" in problem for problem in done.problems)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    to = tmp_path / "model.safetensors"
    with pytest.raises(LaunchError, match="there is no folder"):
        export_run(str(tmp_path / "missing"), to)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        export_run(str(tmp_path), to, dtype="int4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="no usable snapshot"):
        export_run(str(tmp_path / "empty"), to)
    folder = run_folder(tmp_path / "run", durability="none")
    with pytest.raises(StoreError, match=r"holds no state.*--durability none"):
        export_run(str(folder.path), to)
    folder.model_file.touch()
    with pytest.raises(StoreError, match=r"its model is in .*model.safetensors already"):
        export_run(str(folder.path), to)
    with pytest.raises(AtollError):
        export_run("nosuchscheme://bucket/run", to)
    assert not to.exists()


def test_a_target_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    write_state(folder.state, model(8))
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match=r"cannot write .*--to"):
        export_run(str(folder.path), tmp_path / "file" / "model.safetensors")


def test_buffers_of_a_learner_or_their_mean_are_added_to_the_model(tmp_path: Path) -> None:
    folder, to = run_folder(tmp_path / "run"), tmp_path / "model.safetensors"
    write_state(folder.state, model(3))
    write_buffers(folder.path, "learner-0", 2.0)
    write_buffers(folder.path, "learner-1", 5.0)
    write_buffers(folder.path, "other", 500.0, run="another")
    for whose, mean, seen in (("learner-1", 5.0, 5), ("mean", 3.5, 4)):
        done = export_run(str(folder.path), to, dtype="bfloat16", buffers=whose, force=True)
        found = load_file(to)
        assert torch.equal(found["norm.running_mean"], torch.full((4,), mean)), "in their own type"
        assert found["norm.num_batches_tracked"] == seen and found["norm.num_batches_tracked"].dtype is torch.int64
        assert found["1.weight"].dtype is torch.bfloat16
        assert done.buffers == 3 and done.parameters == sum(p.numel() for p in model(3).parameters())
        assert f"buffers are those of learner-{whose[-1] if whose != 'mean' else 0} at its step 50" in done.problems
    assert any("another" in problem for problem in done.problems), "who was left out is said"
    export_run(str(folder.path), to, force=True)
    assert equal(to, model(3)), "none unless asked for"


def test_buffers_that_are_nowhere_are_an_error_that_says_where_they_would_be(tmp_path: Path) -> None:
    folder, to = run_folder(tmp_path / "run"), tmp_path / "model.safetensors"
    write_state(folder.state, model(3))
    write_snapshot(str(tmp_path / "snapshots"), model(3), 1)
    for source in (str(folder.path), str(folder.state), str(tmp_path / "snapshots"), f"file://{tmp_path}/snapshots"):
        with pytest.raises(LaunchError, match="give the folder of the run itself, or leave --buffers out"):
            export_run(source, to, buffers="mean")
    write_buffers(folder.path, "learner-0", 2.0)
    with pytest.raises(StoreError, match=r"no checkpoint of learner-7 .*those of: learner-0\)"):
        export_run(str(folder.path), to, buffers="learner-7")
    assert not to.exists()


def test_a_file_that_is_there_is_not_replaced_unless_one_says_so(tmp_path: Path) -> None:
    folder, to = run_folder(tmp_path / "run"), tmp_path / "model.safetensors"
    write_state(folder.state, model(8))
    to.write_bytes(b"somebody's own model")
    with pytest.raises(LaunchError, match=r"model.safetensors exists .*--force"):
        export_run(str(folder.path), to)
    assert to.read_bytes() == b"somebody's own model"
    export_run(str(folder.path), to, force=True)
    assert equal(to, model(8))


def test_a_location_that_cannot_be_reached_is_one_sentence_with_its_endpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("s3fs", reason="pip install 'atoll[s3]'")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    options = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}
    with pytest.raises(StoreError) as told:
        export_run("s3://bucket/run", tmp_path / "model.safetensors", options=options)
    text = str(told.value)
    assert text.startswith("the snapshot location s3://bucket/run cannot be reached (endpoint http://127.0.0.1:9; ")
    assert "check the URL" in text and "\n" not in text
