"""Snapshots in a bucket, against a real S3 server on loopback."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from buckets import new_bucket, s3_server
from store_helpers import arrays_of, meta_of, rows_at, versions_of

from atoll.errors import FencedSyncerError, StoreError
from atoll.store import Hold, SnapshotTarget, claim, load_snapshot, remote_folder, snapshots

pytest.importorskip("s3fs", reason="pip install 'atoll[s3]'")
pytest.importorskip("moto.server", reason="pip install 'atoll[dev]'")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with s3_server(tmp_path_factory.mktemp("moto")) as url:
        yield url


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A new bucket. The endpoint and the credentials come from the environment, as they do for users."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setattr(snapshots, "READ_PAUSE_S", 0.0)
    return new_bucket(endpoint)


def take(target: SnapshotTarget, number: int) -> None:
    draft = target.begin(number)
    for fragment in range(2):
        draft.put_fragment(fragment, number, arrays_of(fragment, number), meta_of(fragment, number))
    draft.finish(rows_at(number), {"run": "r1"})


def test_snapshots_in_a_bucket(bucket: str) -> None:
    target = SnapshotTarget(f"s3://{bucket}/runs/one", keep=2)
    assert target.load_newest() == (None, [])
    for number in range(1, 5):
        take(target, number)
    target.begin(9).put_fragment(0, 9, arrays_of(0, 9), {})  # never finished
    loaded, problems = SnapshotTarget(f"s3://{bucket}/runs/one").load_newest()
    assert loaded is not None and loaded.label == 4 and loaded.rows == rows_at(4) and loaded.about["run"] == "r1"
    assert versions_of(loaded) == {0: 4, 1: 4} and "never finished" in problems[0]
    assert target._labels() == [3, 4, 9]
    take(target, 10)
    assert target._labels() == [4, 10]
    assert versions_of(load_snapshot(f"s3://{bucket}/runs/one/snapshot-00000004")) == {0: 4, 1: 4}


def test_large_files_go_up_in_parts_and_come_back(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_folder, "PART_BYTES", 5 << 20)  # the least that S3 takes
    array = np.random.default_rng(0).standard_normal(3 << 20, dtype=np.float32)  # 12 MiB
    draft = SnapshotTarget(f"s3://{bucket}").begin(1)
    draft.put_fragment(0, 1, {"theta": array, "momentum": array[::-1].copy()}, {})
    stats = draft.finish({}, {})
    assert stats.bytes > 2 * array.nbytes
    found = load_snapshot(f"s3://{bucket}").fragments[0].arrays
    assert found["theta"].tobytes() == array.tobytes() and found["momentum"].tobytes() == array[::-1].tobytes()


def test_options_name_the_endpoint_too(bucket: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    options = {"endpoint_url": endpoint, "key": "someone", "secret": "something"}
    take(SnapshotTarget(f"s3://{bucket}/run", options=options), 1)
    assert versions_of(load_snapshot(f"s3://{bucket}/run", options)) == {0: 1, 1: 1}


def test_a_damaged_object_is_named_and_the_next_older_snapshot_is_used(bucket: str, endpoint: str) -> None:
    target = SnapshotTarget(f"s3://{bucket}/run")
    take(target, 1)
    take(target, 2)
    bytes_there = fsspec.filesystem("s3", endpoint_url=endpoint, key="someone", secret="something")
    name = f"{bucket}/run/snapshot-00000002/fragment-0001.safetensors"
    data = bytearray(bytes_there.cat_file(name))
    data[-1] ^= 1
    bytes_there.pipe_file(name, bytes(data))
    loaded, problems = target.load_newest()
    assert versions_of(loaded) == {0: 1, 1: 1}
    assert "snapshot-00000002: fragment-0001.safetensors does not match its checksum" in problems[0]


def test_a_bucket_lets_one_of_many_claim_it_and_the_others_hear_why(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "CLAIM_LOOK_S", 0.02)
    url = f"s3://{bucket}/run"
    together = threading.Barrier(4)

    def try_it(_: int) -> Hold | str:
        target = SnapshotTarget(url)
        target.load_newest()  # connected
        together.wait()
        try:
            return target.claim(epoch=1, take_over=False, say=lambda text: None, watch_s=5.0)
        except StoreError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(try_it, range(3 + 1)))
    first = next(answer for answer in answers if isinstance(answer, Hold))
    assert first.claim.number == 1
    # Whoever came a moment later has watched it stand still; nobody has the same number.
    numbers = [answer.claim.number for answer in answers if isinstance(answer, Hold)]
    assert len(set(numbers)) == len(numbers)
    second = SnapshotTarget(url).claim(epoch=1, take_over=True, say=lambda text: None)
    assert second.claim.number == 1 + max(numbers)
    second.renew("r1", 2000, begun=True)
    with pytest.raises(FencedSyncerError, match="newer syncer"):
        first.renew("r1", 1, begun=True)
    third = SnapshotTarget(url).claim(epoch=1, take_over=True, say=lambda text: None)
    assert third.claim.number == 2001 and third.before is not None and third.before.begun


def test_a_bucket_that_is_not_there_is_an_error_and_is_not_made(bucket: str) -> None:
    target = SnapshotTarget(f"s3://{bucket}-elsewhere/run")
    for _ in range(2):
        with pytest.raises(OSError):
            take(target, 1)


def test_a_server_that_is_down_is_an_os_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    options = {"config_kwargs": {"retries": {"max_attempts": 0}, "connect_timeout": 1}}
    target = SnapshotTarget(f"s3://{bucket}/run", options=options)
    with pytest.raises(OSError):
        target.begin(1)
    with pytest.raises(OSError):
        target.load_newest()
