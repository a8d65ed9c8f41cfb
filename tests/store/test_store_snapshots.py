"""Snapshots: whole or not there, the newest good one is loaded, old ones go."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import xxhash
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from store_helpers import arrays_of, meta_of, rows_at, versions_of

from atoll.errors import ConfigError, StoreError
from atoll.instruments.chaos import failpoints
from atoll.store import LoadedSnapshot, SnapshotStats, SnapshotTarget, load_snapshot, snapshots

damage = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "READ_PAUSE_S", 0.0)


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    places = {
        "path": str(tmp_path / "a" / "b"),
        "file": f"file://{tmp_path}/c",
        "memory": f"memory://{uuid.uuid4()}/run",
    }
    return places[request.param]


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4()}"


def take(target: SnapshotTarget, number: int) -> SnapshotStats:
    """A snapshot of three fragments at version `number` and the rows after as many batches."""
    draft = target.begin(number)
    for fragment in range(3):
        draft.put_fragment(fragment, number, arrays_of(fragment, number), meta_of(fragment, number))
    return draft.finish(rows_at(number), {"run": "r1", "epoch": 4, "config": {"quorum": "all"}})


def check(loaded: LoadedSnapshot | None, number: int) -> None:
    assert loaded is not None
    assert versions_of(loaded) == dict.fromkeys(range(3), number) and loaded.rows == rows_at(number)
    assert loaded.about["run"] == "r1" and loaded.about["epoch"] == 4 and "created" in loaded.about
    assert loaded.about["versions"] == dict.fromkeys("012", number)


def test_a_snapshot_comes_back(url: str) -> None:
    target = SnapshotTarget(url)
    assert target.load_newest() == (None, [])
    stats = take(target, 42)
    assert stats.label == 42 and stats.url.endswith("/snapshot-00000042") and stats.problems == ()
    assert stats.bytes > 3 * 3 * arrays_of(0, 0)["theta"].nbytes and stats.write_ns > 0
    loaded, problems = SnapshotTarget(url).load_newest()
    check(loaded, 42)
    assert problems == [] and loaded is not None and loaded.label == 42
    check(load_snapshot(url), 42)
    check(load_snapshot(stats.url), 42)
    assert load_snapshot(stats.url).label == 42


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    take(SnapshotTarget(str(tmp_path)), 7)
    found = load_file(tmp_path / "snapshot-00000007" / "fragment-0002.safetensors")
    expected = arrays_of(2, 7)
    assert found.keys() == expected.keys()
    assert all((found[name] == array).all() for name, array in expected.items())
    manifest = json.loads((tmp_path / "snapshot-00000007" / "manifest.json").read_bytes())
    assert manifest["format"] == 2 and set(manifest["files"]) == {
        "rows.json",
        *(f"fragment-000{i}.safetensors" for i in range(3)),
    }


def test_empty_arrays_and_no_fragments_are_fine(url: str) -> None:
    draft = SnapshotTarget(url).begin(1)
    draft.put_fragment(0, 1, {"none": np.zeros(0, np.float32), "counts": np.arange(3)}, {})
    draft.finish({}, {})
    arrays = load_snapshot(url).fragments[0].arrays
    assert arrays["none"].size == 0 and arrays["counts"].tolist() == [0, 1, 2]
    SnapshotTarget(url).begin(2).finish({"a": 1}, {})
    assert load_snapshot(url).fragments == {} and load_snapshot(url).rows == {"a": 1}


def test_labels_count_up(url: str) -> None:
    target = SnapshotTarget(url, keep=9)
    assert [take(target, number).label for number in (5, 5, 3, 9)] == [5, 6, 7, 9]


def test_retention_keeps_the_newest_and_removes_halves(url: str) -> None:
    target = SnapshotTarget(url, keep=2)
    target.begin(1).put_fragment(0, 1, arrays_of(0, 1), {})  # never finished
    take(target, 2)
    take(target, 3)
    half = target.begin(9)
    half.put_fragment(0, 9, arrays_of(0, 9), {})  # in the making: newer than what is finished next
    names = _names(url)
    assert names == ["snapshot-00000002", "snapshot-00000003", "snapshot-00000009"]
    half.abandon()
    assert _names(url) == names[:2]
    stats = take(target, 4)
    assert stats.deleted == ("snapshot-00000002",) and _names(url) == ["snapshot-00000003", "snapshot-00000004"]
    check(target.load_newest()[0], 4)
    with pytest.raises(ConfigError, match="--keep 1"):
        SnapshotTarget(url, keep=0)


def _names(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(name.rstrip("/").rpartition("/")[2] for name in fs.ls(root, detail=False))


def _pipe(url: str, change: Callable[[bytes], bytes | None]) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    changed = change(fs.cat_file(path))
    fs.rm_file(path) if changed is None else fs.pipe_file(path, changed)


FILES = ["manifest.json", "rows.json", "fragment-0000.safetensors", "fragment-0002.safetensors"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("kind", ["missing", "empty", "cut", "longer", "flipped"])
def test_a_damaged_snapshot_is_named_and_the_next_older_one_is_used(place: str, file: str, kind: str) -> None:
    target = SnapshotTarget(place)
    take(target, 1)
    take(target, 2)
    changes: dict[str, Callable[[bytes], bytes | None]] = {
        "missing": lambda data: None,
        "empty": lambda data: b"",
        "cut": lambda data: data[: len(data) // 2],
        "longer": lambda data: data + b"x",
        "flipped": lambda data: (
            data[: len(data) * 3 // 4] + bytes([data[len(data) * 3 // 4] ^ 4]) + data[len(data) * 3 // 4 + 1 :]
        ),
    }
    _pipe(f"{place}/snapshot-00000002/{file}", changes[kind])
    loaded, problems = target.load_newest()
    check(loaded, 1)
    (problem,) = problems
    assert "snapshot-00000002" in problem and file in problem and "the next older snapshot is used" in problem
    assert loaded is not None and loaded.problems == problems
    with pytest.raises(StoreError, match="snapshot-00000002"):
        load_snapshot(f"{place}/snapshot-00000002")


@damage
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, data: st.DataObject) -> None:
    root = tmp_path / "root"
    if not root.exists():
        take(SnapshotTarget(str(root)), 1)
    path = root / "snapshot-00000001" / data.draw(st.sampled_from(FILES))
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        path.write_bytes(torn)
        loaded, problems = SnapshotTarget(str(root)).load_newest()
        if loaded is not None:  # white space in the manifest, or the case of a letter in a checksum's name
            check(loaded, 1)
        else:
            assert problems
    except StoreError as error:
        assert "install a newer atoll" in str(error) or "too old" in str(error)  # the digit of the format
    finally:
        path.write_bytes(whole)


def test_when_nothing_is_left_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no usable snapshot in .*there is none"):
        load_snapshot(str(tmp_path))
    stats = take(SnapshotTarget(str(tmp_path)), 1)
    Path(stats.url, "manifest.json").unlink()
    loaded, problems = SnapshotTarget(str(tmp_path)).load_newest()
    assert loaded is None and "never finished" in problems[0]
    with pytest.raises(StoreError, match="never finished"):
        load_snapshot(stats.url)


# ------------------------------------------------------------ formats


def _rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_bytes()))))


def test_the_format_before_is_read(tmp_path: Path) -> None:
    stats = take(SnapshotTarget(str(tmp_path)), 1)

    def to_format_1(document: dict[str, Any]) -> dict[str, Any]:
        files = [[name, entry["size"], entry["xxh3"]] for name, entry in document["files"].items()]
        return {"format": 1, "files": files, "about": document["about"]}

    _rewrite(Path(stats.url, "manifest.json"), to_format_1)
    check(SnapshotTarget(str(tmp_path)).load_newest()[0], 1)


@pytest.mark.parametrize(("number", "told"), [(3, "install a newer atoll"), (0, "too old")])
def test_formats_that_cannot_be_read_are_refused_and_not_skipped(tmp_path: Path, number: int, told: str) -> None:
    """Falling back to an older snapshot would lose progress that a newer version can read."""
    target = SnapshotTarget(str(tmp_path))
    take(target, 1)
    stats = take(target, 2)
    _rewrite(Path(stats.url, "manifest.json"), lambda document: {**document, "format": number})
    with pytest.raises(StoreError, match=rf"snapshot-00000002.*{told}"):
        target.load_newest()
    with pytest.raises(StoreError, match=told):
        load_snapshot(stats.url)


@pytest.mark.parametrize("name", ["../../etc/passwd", "fragment-0000.safetensors/x", "model.pkl"])
def test_a_manifest_cannot_point_elsewhere(tmp_path: Path, name: str) -> None:
    stats = take(SnapshotTarget(str(tmp_path)), 1)

    def point(document: dict[str, Any]) -> dict[str, Any]:
        body = {"files": {**document["files"], name: {"size": 1, "xxh3": "0"}}, "about": document["about"]}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return {"format": 2, "xxh3": xxhash.xxh3_64_hexdigest(text.encode()), **body}

    _rewrite(Path(stats.url, "manifest.json"), point)
    loaded, problems = SnapshotTarget(str(tmp_path)).load_newest()
    assert loaded is None and "not a snapshot's" in problems[0]


def test_sizes_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    """A sparse file of a terabyte in the place of a small one is refused without being allocated."""
    target = SnapshotTarget(str(tmp_path))
    take(target, 1)
    stats = take(target, 2)
    os.truncate(Path(stats.url, "rows.json"), 1 << 40)
    os.truncate(Path(stats.url, "fragment-0001.safetensors"), 1 << 40)
    loaded, problems = target.load_newest()
    check(loaded, 1)
    assert f"has {1 << 40} bytes" in problems[0]


# ------------------------------------------------------------ places that fail


SNAPSHOT_POINTS = [name for name in failpoints.FAILPOINTS if name.startswith("snapshot.") and name != "snapshot.delete"]


@pytest.mark.parametrize("point", SNAPSHOT_POINTS)
def test_a_snapshot_that_fails_leaves_the_one_before(place: str, point: str) -> None:
    target = SnapshotTarget(place)
    take(target, 1)
    with failpoints.arm(f"{point}:1-1:enospc"):
        try:
            take(target, 2)
            assert "memory" in place and point.rpartition(".")[2] in ("rename", "sync")  # only on a local disk
        except OSError as error:
            assert "failpoint" in str(error)
            loaded, _ = target.load_newest()
            # Once the manifest's last byte is written the snapshot may be there, although nobody was told so.
            written = point in ("snapshot.manifest.sync", "snapshot.manifest.folder.sync")
            assert loaded is not None and loaded.label in ((1, 2) if written else (1,))
            check(loaded, loaded.label)
    assert take(target, 3).label == 3
    check(target.load_newest()[0], 3)
    assert len(_names(place)) <= 3


def test_deletions_that_fail_are_told_and_made_up_for(place: str) -> None:
    target = SnapshotTarget(place, keep=1)
    take(target, 1)
    with failpoints.arm("snapshot.delete:1:eio"):
        stats = take(target, 2)
    assert stats.deleted == () and "snapshot-00000001 could not be deleted" in stats.problems[0]
    assert take(target, 3).deleted == ("snapshot-00000002", "snapshot-00000001")


class Unreliable(MemoryFileSystem):
    """A backend whose calls fail with whatever comes up its stack, as many times as is said."""

    protocol = "unreliable"
    failures = 0

    def _fail(self) -> None:
        if Unreliable.failures > 0:
            Unreliable.failures -= 1
            raise RuntimeError("connection reset by somebody")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self._fail()
        return super().ls(path, detail=detail, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> Any:
        self._fail()
        return super().cat_file(path, start=start, end=end, **options)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._fail()
        return super()._open(path, mode, **options)


fsspec.register_implementation("unreliable", Unreliable, clobber=True)


@pytest.fixture
def unreliable() -> SnapshotTarget:
    Unreliable.failures = 0
    return SnapshotTarget(f"unreliable://{uuid.uuid4()}")


def test_every_failure_of_a_backend_is_an_os_error(unreliable: SnapshotTarget) -> None:
    take(unreliable, 1)
    for action in (lambda: unreliable.begin(2), lambda: take(unreliable, 2), unreliable.load_newest):
        Unreliable.failures = 1000
        with pytest.raises(OSError, match="RuntimeError: connection reset"):
            action()
    Unreliable.failures = 0
    draft = unreliable.begin(2)
    Unreliable.failures = 1
    with pytest.raises(OSError):
        draft.put_fragment(0, 2, arrays_of(0, 2), {})
    draft.put_fragment(0, 2, arrays_of(0, 2), meta_of(0, 2))  # may be tried again
    draft.finish({}, {})
    assert versions_of(unreliable.load_newest()[0]) == {0: 2}


def test_a_passing_fault_does_not_cost_the_newest_snapshot(unreliable: SnapshotTarget) -> None:
    take(unreliable, 1)
    take(unreliable, 2)
    real = unreliable._labels
    unreliable._labels = lambda: (real(), setattr(Unreliable, "failures", 2))[0]  # type: ignore[method-assign]
    loaded, problems = unreliable.load_newest()
    check(loaded, 2)
    assert problems == []


def test_a_place_that_cannot_be_reached_is_not_an_empty_one(unreliable: SnapshotTarget) -> None:
    take(unreliable, 1)
    real = unreliable._labels
    unreliable._labels = lambda: (real(), setattr(Unreliable, "failures", 99))[0]  # type: ignore[method-assign]
    with pytest.raises(OSError, match="connection reset"):
        unreliable.load_newest()


def test_a_scheme_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'atoll\[s3\]'"):
        SnapshotTarget("s3://bucket/run")
    with pytest.raises(ConfigError, match="pip install gcsfs"):
        SnapshotTarget("gs://bucket/run")
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="give a path or an fsspec URL"):
        SnapshotTarget("nosuchthing://bucket/run")
