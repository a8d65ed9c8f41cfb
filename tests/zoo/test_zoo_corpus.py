"""Corpora: sources, the held-out part, disjoint shards, reproducible batches, errors with remedies."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from atoll.errors import ConfigError, CorpusError
from atoll.zoo import Batches, Corpus, build_model, eval_loss, load_corpus, load_saved, save_model, sources
from atoll.zoo.evaluate import held_out_batches


def numbered(count: int) -> Corpus:
    """A corpus whose every 4 bytes are different, so that a window tells where it came from."""
    return Corpus.from_bytes(np.arange(count, dtype=">u4").tobytes(), "numbered")


def words(data: np.ndarray) -> set[bytes]:
    """All runs of 8 bytes. Cuts may fall inside a number, but each run holds a whole one and so stands in one place."""
    raw = data.tobytes()
    return {raw[i : i + 8] for i in range(len(raw) - 7)}


@pytest.mark.parametrize("size", [4_000, 100_000, 2_000_000])
def test_held_out_is_two_percent_and_disjoint_from_training(size: int) -> None:
    corpus = numbered(size)
    assert len(corpus.train) + len(corpus.held_out) == 4 * size
    assert 0.015 < len(corpus.held_out) / (4 * size) < 0.025
    if size <= 100_000:
        assert not words(corpus.held_out) & words(corpus.train)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_are_disjoint_and_cover_the_training_part(count: int) -> None:
    corpus = numbered(200_000)
    shards = [corpus.shard(i, count).data for i in range(count)]
    assert sum(map(len, shards)) == len(corpus.train)
    assert max(map(len, shards)) - min(map(len, shards)) <= len(corpus.train) // 60_000 + 2
    together = np.sort(np.concatenate(shards))
    assert np.array_equal(together, np.sort(corpus.train))
    for i in range(count):
        for j in range(i):
            assert not words(shards[i]) & words(shards[j])


def test_joiner_beyond_the_count_shares_a_shard_but_not_its_batches() -> None:
    corpus = numbered(10_000)
    first, joiner = corpus.shard(1, 4), corpus.shard(5, 4)
    assert np.array_equal(first.data, joiner.data)
    one, other = (next(Batches(s, batch=4, seq=16, seed=0)) for s in (first, joiner))
    assert not torch.equal(one[0], other[0])
    with pytest.raises(ConfigError, match="counts from 0"):
        corpus.shard(-1, 4)


def test_batches_are_windows_of_the_shard_and_reproducible() -> None:
    shard = numbered(5_000).shard(0, 2)
    batches = Batches(shard, batch=3, seq=20, seed=7)
    raw = shard.data.tobytes()
    drawn = [next(batches) for _ in range(5)]
    for inputs, targets in drawn:
        assert inputs.shape == targets.shape == (3, 20) and inputs.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        for row in inputs:
            assert bytes(row.tolist()) in raw
    again = Batches(shard, batch=3, seq=20, seed=7, start=3)
    assert torch.equal(next(again)[0], drawn[3][0]) and again.position == 4
    assert torch.equal(batches.at(0)[1], drawn[0][1])


@pytest.mark.parametrize("change", [{"seed": 8}, {"start": 1}])
def test_another_seed_or_position_reads_something_else(change: dict[str, int]) -> None:
    shard = numbered(5_000).shard(0, 1)
    usual = {"batch": 4, "seq": 20, "seed": 7}
    assert not torch.equal(next(Batches(shard, **usual))[0], next(Batches(shard, **{**usual, **change}))[0])


def test_shard_of_exactly_one_window() -> None:
    corpus = Corpus.from_bytes(bytes(range(100)))
    inputs, targets = next(Batches(corpus.shard(0, 1), batch=2, seq=97, seed=0))
    assert torch.equal(inputs[0, 1:], targets[0, :-1])


def test_stdlib_is_text() -> None:
    corpus = load_corpus("stdlib")
    assert len(corpus.train) > 5_000_000 and not corpus.truncated
    assert b"def " in corpus.held_out.tobytes()
    assert all("site-packages" not in p.parts for p in sources.stdlib_files())


def test_folder_skips_binary_and_hidden_files_and_is_sorted(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b" / "two.txt").write_text("TWO" * 50)
    (tmp_path / "a.txt").write_text("one" * 50)
    (tmp_path / ".git" / "no").write_text("hidden")
    (tmp_path / "image.bin").write_bytes(b"\0\1\2" * 50)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    data, truncated = sources.read_source(str(tmp_path))
    assert data == b"one" * 50 + b"TWO" * 50 and not truncated


def test_file_and_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"abc" * 1000)
    assert len(load_corpus(str(file)).train) == 2940
    monkeypatch.setattr(sources, "CORPUS_BYTES_MAX", 1000)
    corpus = load_corpus(str(file))
    assert corpus.truncated and len(corpus.train) + len(corpus.held_out) == 1000


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="use stdlib"):
        load_corpus(str(tmp_path / "missing"))
    with pytest.raises(CorpusError, match=r"is empty.*--corpus stdlib"):
        load_corpus(str(tmp_path))
    small = Corpus.from_bytes(b"x" * 1000, "small")
    with pytest.raises(CorpusError, match=r"490 for each of 2 learners.*--seq"):
        small.check(2, 490)
    with pytest.raises(CorpusError, match="at least 6450 bytes"):
        small.check(1, 128)
    small.check(2, 16)
    with pytest.raises(CorpusError, match="--seq"):
        Batches(small.shard(0, 100), batch=1, seq=128, seed=0)
    with pytest.raises(CorpusError, match="--seq"):
        eval_loss(build_model("nano", 0), small, batch=1, seq=128)
    with pytest.raises(ConfigError, match="at least 1"):
        Batches(small.shard(0, 1), batch=0, seq=8, seed=0)
    with pytest.raises(ConfigError, match="from 0"):
        Batches(small.shard(0, 1), batch=1, seq=8, seed=-1)


def test_missing_datasets_library_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match="pip install datasets"):
        load_corpus("hf:roneneldan/TinyStories")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
def test_local_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"id": i, "text": f"row {i}", "other": "o"} for i in range(100)]
    wanted = "".join(f"row {i}\n" for i in range(100)).encode()
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    # Not Dataset.from_list: datasets 5.2 cannot fingerprint a table made in memory with pyarrow 26.
    table = datasets.load_dataset("json", data_files=str(lines), split="train")
    table.to_parquet(str(tmp_path / "rows.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "both"))
    for spec in ("rows.jsonl", "rows.parquet", "saved", "both:test:text"):
        assert sources.read_source(f"hf:{tmp_path / spec}") == (wanted, False)
    assert sources.read_source(f"hf:{lines}:train:other")[0] == b"o\n" * 100
    with pytest.raises(CorpusError, match="its columns are id, text, other"):
        load_corpus(f"hf:{lines}:train:nope")
    with pytest.raises(CorpusError, match="name a text column"):
        load_corpus(f"hf:{lines}:train:id")
    with pytest.raises(CorpusError, match="cannot load"):
        load_corpus(f"hf:{tmp_path / 'missing.jsonl'}")


def test_evaluation_is_fixed_and_spread_over_the_held_out_part() -> None:
    corpus = numbered(200_000)
    pairs = held_out_batches(corpus, batch=4, seq=32, batches_max=3)
    assert [tuple(inputs.shape) for inputs, _ in pairs] == [(4, 32)] * 3
    raw = corpus.held_out.tobytes()
    places = [raw.index(bytes(row.tolist())) for inputs, _ in pairs for row in inputs]
    assert places == sorted(places) and places[-1] > 0.8 * len(raw)
    model = build_model("nano", 0)
    first = eval_loss(model, corpus, batch=4, seq=32, batches_max=3)
    assert first == eval_loss(model, corpus, batch=4, seq=32, batches_max=3)
    assert first == pytest.approx(eval_loss(model, corpus, batch=2, seq=32, batches_max=6), rel=1e-5)
    assert 5.0 < first < 6.0 and model.training


@pytest.mark.parametrize("preset", ["nano", "tiny"])
def test_saved_model_comes_back(tmp_path: Path, preset: str) -> None:
    model = build_model(preset, 1)
    save_model(model, tmp_path / "model.safetensors")
    back = load_saved(tmp_path / "model.safetensors", preset)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    with pytest.raises(ConfigError, match="size"):
        load_saved(tmp_path / "model.safetensors", "small" if preset == "tiny" else "tiny")
