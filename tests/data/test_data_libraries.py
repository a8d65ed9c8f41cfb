"""atoll.data with the libraries that people have: Hugging Face datasets, torchdata, MosaicML's shards."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_fakes import FakeRun, Numbers, train

import atoll.data
from atoll.errors import ConfigError, CorpusError

datasets = pytest.importorskip("datasets")
stateful = pytest.importorskip("torchdata.stateful_dataloader")
WORKERS = pytest.mark.parametrize("num_workers", [0, 2])


def numbers_of(batches: Any) -> Any:
    """What `train` of the fakes counts, out of rows."""
    return (batch["number"] for batch in batches)


# ---------------------------------------------------------------- Hugging Face datasets


@WORKERS
def test_a_hugging_face_dataset_is_read_once_over_all_learners(run: FakeRun, num_workers: int) -> None:
    rows = datasets.Dataset.from_dict({"number": list(range(60))})
    one, two = run.learner("a"), run.learner("b")
    common = {"batch_size": 4, "chunk_size": 10, "ahead_s": 0, "num_workers": num_workers}
    first, second = (atoll.data.loader(learner, rows, **common) for learner in (one, two))
    seen = train(one, numbers_of(first), steps=5)
    seen += train(two, numbers_of(second), steps=3)
    one.leave()
    seen += train(two, numbers_of(second))
    assert sorted(seen) == list(range(60))


@WORKERS
def test_a_hugging_face_stream_is_read_once_per_epoch(run: FakeRun, num_workers: int) -> None:
    rows = datasets.Dataset.from_dict({"number": list(range(50))}).to_iterable_dataset(num_shards=2)
    learner = run.learner("a")
    loader = atoll.data.iterable(
        learner, rows, batch_size=4, chunk_size=10, epochs=2, samples=50, ahead_s=0, num_workers=num_workers
    )
    assert sorted(train(learner, numbers_of(loader))) == sorted(list(range(50)) * 2)


def test_two_learners_share_a_shuffled_stream(run: FakeRun) -> None:
    """The stream's own shuffle buffer is seeded, and the epoch changes its order on both alike."""

    def rows() -> Any:
        stream = datasets.Dataset.from_dict({"number": list(range(50))}).to_iterable_dataset(num_shards=2)
        return stream.shuffle(seed=3, buffer_size=8)

    learners = run.learner("a"), run.learner("b")
    loaders = [atoll.data.iterable(x, rows(), batch_size=5, chunk_size=10, ahead_s=0) for x in learners]
    loops = [numbers_of(loader) for loader in loaders]
    seen = train(learners[0], loops[0], steps=3) + train(learners[1], loops[1])
    learners[0].leave()
    seen += train(learners[1], numbers_of(loaders[1]))
    assert sorted(seen) == list(range(50)) and seen != list(range(50))


# ---------------------------------------------------------------- torchdata


@WORKERS
def test_a_stateful_dataloader_hands_its_settings_over(run: FakeRun, num_workers: int) -> None:
    given = stateful.StatefulDataLoader(
        Numbers(40),
        batch_size=4,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=lambda samples: [-x for x in samples],
    )
    learner = run.learner("a")
    loader = atoll.data.loader(learner, given, chunk_size=10, ahead_s=0)
    seen = train(learner, iter(loader))
    assert sorted(seen) == sorted(-x for x in range(40)) and seen != [-x for x in range(40)]
    again = atoll.data.loader(run.learner("b"), given, chunk_size=10, stream="again")
    with pytest.raises(ConfigError, match="same data and settings"):
        again.load_state_dict(loader.state_dict())


def test_a_stateful_dataloader_of_a_stream(run: FakeRun) -> None:
    rows = datasets.Dataset.from_dict({"number": list(range(30))}).to_iterable_dataset()
    learner = run.learner("a")
    given = stateful.StatefulDataLoader(rows, batch_size=5)
    loader = atoll.data.loader(learner, given, chunk_size=10, ahead_s=0)
    assert sorted(train(learner, numbers_of(loader))) == list(range(30))


def test_a_dataloader_that_cuts_its_own_batches_is_refused(run: FakeRun) -> None:
    given = stateful.StatefulDataLoader(Numbers(6), batch_sampler=[[0, 1], [2, 3, 4, 5]])
    with pytest.raises(ConfigError, match="batch_sampler"):
        atoll.data.loader(run.learner("a"), given)


# ---------------------------------------------------------------- MosaicML's shards


def write_shards(folder: Path, samples: list[dict[str, Any]], per_shard: int = 4) -> None:
    """As the public layout says: see atoll.data.mds."""
    names, encodings, sizes = ["label", "text", "tokens"], ["int", "str", "ndarray:uint16"], [8, None, None]
    shards = []
    for number in range(0, len(samples), per_shard):
        bodies = []
        for sample in samples[number : number + per_shard]:
            text = sample["text"].encode()
            shape = np.array(sample["tokens"].shape, np.uint8)
            array = bytes([len(shape) << 2]) + shape.tobytes() + sample["tokens"].tobytes()
            bodies.append(struct.pack("<II", len(text), len(array)) + struct.pack("<q", sample["label"]) + text + array)
        settings = json.dumps({"column_names": names}).encode()
        first = 4 + 4 * (len(bodies) + 1) + len(settings)
        offsets = np.cumsum([first, *map(len, bodies)]).astype("<u4")
        name = f"shard.{len(shards):05}.mds"
        data = struct.pack("<I", len(bodies)) + offsets.tobytes() + settings + b"".join(bodies)
        (folder / name).write_bytes(data)
        shards.append(
            {
                "format": "mds",
                "samples": len(bodies),
                "zip_data": None,
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "column_names": names,
                "column_encodings": encodings,
                "column_sizes": sizes,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def samples_of(count: int) -> list[dict[str, Any]]:
    return [
        {"label": -n, "text": f"número {n}", "tokens": np.arange(n % 5 * 2, dtype=np.uint16).reshape(2, -1)}
        for n in range(count)
    ]


def test_shards_give_back_what_was_written(tmp_path: Path) -> None:
    written = samples_of(10)
    write_shards(tmp_path, written)
    read = atoll.data.shards(tmp_path)
    assert len(read) == 10
    for index in (9, 0, 4, 3):
        assert read[index]["label"] == written[index]["label"] and read[index]["text"] == written[index]["text"]
        np.testing.assert_array_equal(read[index]["tokens"], written[index]["tokens"])
    with pytest.raises(IndexError):
        read[10]


@WORKERS
def test_shards_are_shared_like_any_data(run: FakeRun, tmp_path: Path, num_workers: int) -> None:
    write_shards(tmp_path, samples_of(30))
    learner = run.learner("a")
    loader = atoll.data.loader(
        learner,
        atoll.data.shards(tmp_path),
        batch_size=4,
        chunk_size=5,
        ahead_s=0,
        num_workers=num_workers,
        collate_fn=lambda samples: [sample["label"] for sample in samples],
    )
    assert sorted(train(learner, iter(loader))) == sorted(-n for n in range(30))


def test_shards_that_cannot_be_read_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="give the folder"):
        atoll.data.shards(tmp_path)
    write_shards(tmp_path, samples_of(3))
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["column_encodings"][0] = "pkl"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match="unpickles nothing"):
        atoll.data.shards(tmp_path)
    index["shards"][0] |= {"column_encodings": ["int", "str", "ndarray"], "zip_data": {"basename": "x"}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(CorpusError, match="without compression"):
        atoll.data.shards(tmp_path)
