"""Payloads and inner state: bytes that become arrays, in the codecs, the learner's vault and its checkpoints."""

from __future__ import annotations

import functools
import json
import math
import shutil
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
import xxhash
from fuzz_engine import Make, Target, mutated, mutated_json, scratch

from atoll.codec import OuterRates, OuterTarget, get_codec, merge_fragment, reduce
from atoll.core.config import CODECS, SyncConfig
from atoll.core.layout import build_layout
from atoll.core.messages import TensorSpec
from atoll.errors import PayloadError
from atoll.learner import inner
from atoll.learner.checkpoint import CheckpointFile
from atoll.learner.vault import Vault

ELEMENTS = (0, 1, 255, 256, 300, 512)
"""None, short last blocks, whole blocks."""
FLOATS = (0.0, -0.0, 1.0, math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e-45, 4.25e37, 2.6e36, 1e-38, 1e30)
"""What a scale or a value may be: the largest that are allowed, just above them, subnormal, not finite."""


# ---------------------------------------------------------------- codecs


def _payloads(name: str) -> Make:
    """Payloads of the right size with random content, some with numbers that hurt; and mutated ones."""
    codec = get_codec(name)
    values = np.random.default_rng(0).standard_normal(300, dtype=np.float32)
    by_bytes = mutated([codec.encode(values[:n].copy()).tobytes() for n in (256, 300)])

    def make(rng: Random) -> bytes:
        n = rng.choice(ELEMENTS)
        if rng.random() < 0.3:
            return bytes([ELEMENTS.index(n)]) + by_bytes(rng)
        data = bytearray(rng.randbytes(codec.size_max(n)))
        if rng.random() < 0.5:
            data[:] = bytes(len(data))
        for _ in range(rng.choice((0, 1, 3)) if len(data) >= 4 else 0):
            at = rng.choice((0, 4 * rng.randrange(len(data) // 4)))
            data[at : at + 4] = struct.pack("<f", rng.choice(FLOATS))
        return bytes([ELEMENTS.index(n)]) + bytes(data)

    return make


def _decode(name: str) -> Callable[[bytes], Any]:
    """Inspect, decode, add, and merge: what a syncer does with a contribution and a learner with an update."""
    codec = get_codec(name)

    def parse(case: bytes) -> Any:
        n, payload = ELEMENTS[case[0] % len(ELEMENTS)] if case else 0, case[1:]
        blocks = np.array([0, -(-n // 256)], np.int64)
        with np.errstate(all="ignore"):
            finite, norms = codec.inspect(payload, n, blocks)
            values = codec.decode(payload, n)
            target = np.ones(n, np.float32)
            codec.decode_add(memoryview(payload), target)
        assert values.size == n
        if finite:
            assert np.isfinite(values).all(), "called finite, and it is not"
            assert np.isfinite(norms).all() and (norms >= 0).all()
        if finite and n and n % 256 == 0:
            _merge(name, payload, n, norms)
        return finite

    return parse


def _merge(name: str, payload: bytes, n: int, norms: Any) -> None:
    """Whatever was let in leaves the state finite, or untouched (invariant I7)."""
    theta, momentum, residual = (np.zeros(n, np.float32) for _ in range(3))
    result = merge_fragment(
        reduce([payload], name, [1.0], [norms], np.array([0, n // 256], np.int64)),
        ["rda"],
        OuterTarget(theta, {"momentum": momentum}, residual),
        codec_down="int4",
        rates=OuterRates(0.7, 0.5),
        previous=None,
    )
    assert np.isfinite(theta).all() and np.isfinite(momentum).all() and np.isfinite(residual).all()
    assert result.finite or not theta.any()


# ---------------------------------------------------------------- the learner's vault


def _vault(codec: str) -> Vault:
    layout = build_layout((TensorSpec("w", (300,), "float32"),), 1)
    return Vault(layout, SyncConfig(fragments=1, codec_down=codec))


def _prepare(codec: str) -> Callable[[bytes], Any]:
    vault = _vault(codec)
    before = vault.prepare_whole(0, 3, np.zeros(4 * 512, np.uint8))

    def parse(data: bytes) -> Any:
        payload = np.frombuffer(data, np.uint8)
        with np.errstate(all="ignore"):
            published = vault.prepare_update(0, before, payload, checksum=0)
        assert published.version == 4 and published.theta.size == 512
        assert not before.theta.any(), "the version before was changed"
        return published

    return parse


def _prepare_whole(data: bytes) -> Any:
    published = _vault("int4").prepare_whole(0, 3, np.frombuffer(data, np.uint8), 5)
    assert published.theta.size == 512
    return published


def _sized(size: int) -> Make:
    sample = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32).tobytes()

    def make(rng: Random) -> bytes:
        if rng.random() < 0.5:
            return rng.randbytes(rng.choice((size, size - 1, size + 1, 4, 3, 0, 2 * size)))
        return mutated([sample])(rng)

    return make


# ---------------------------------------------------------------- inner state


def _model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Place:
    """An extra with one of everything that a tree may hold."""

    def state_dict(self) -> dict[str, Any]:
        odd: dict[str, Any] = {"a": (1, [2.5, None, True]), "big": 10**30, "nan": math.nan, "b": b"\x00\x01"}
        odd |= {"array": np.arange(6, dtype=np.int16).reshape(2, 3), "scalar": np.float32(1.5), "kind": torch.bfloat16}
        odd |= {"last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)}
        return odd | {"low": torch.ones(3, dtype=torch.uint16), "numbers": {1: "x", 2: "y"}}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None: ...


@functools.cache
def blobs() -> tuple[bytes, bytes]:
    """The inner state of a small model, alone and with extras and random numbers."""
    model, optimizer = _model()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    about = inner.InnerAbout("a", "run", 1, 7, (3, 4), 99)
    small = inner.capture(optimizer, {}, about, rng=False)
    whole = inner.capture(optimizer, {"place": Place()}, about)
    return inner.pack(small).tobytes(), inner.pack(whole).tobytes()


def _split(blob: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(blob[:8], "little")
    return blob[8 : 8 + length], blob[8 + length :]


def _inner_of(index: int, part: str) -> Make:
    """The blob with its header, its description or its tree mutated and everything around it right."""
    header, data = _split(blobs()[index])
    document = json.loads(header)

    def seal(changed: bytes) -> bytes:
        if part == "header":
            return len(changed).to_bytes(8, "little") + changed + data
        metadata = {**document["__metadata__"], part: changed.decode("utf-8", "replace")}
        text = json.dumps({**document, "__metadata__": metadata}).encode()
        return len(text).to_bytes(8, "little") + text + data

    sample = header if part == "header" else document["__metadata__"][part].encode()
    return mutated_json([sample], seal)


@functools.cache
def _receiver() -> torch.optim.Optimizer:
    return _model()[1]


def _unpack(data: bytes) -> Any:
    """Read it and, if it is let in, put it into an optimizer: as its own, and as a peer's."""
    captured = inner.unpack(data)
    optimizer = _receiver()
    for take in (
        lambda: inner.restore(captured, optimizer, {"place": Place()}, rng=False),
        lambda: inner.restore_optimizer_only(captured, optimizer),
    ):
        try:
            take()
        except PayloadError:
            pass
        assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    return captured


def _load_checkpoint(seal: bool) -> Callable[[bytes], Any]:
    name = "sealed" if seal else "torn"
    file = CheckpointFile(scratch(f"inner-{name}"), "a")

    def parse(data: bytes) -> Any:
        shutil.rmtree(file.folder, ignore_errors=True)
        file.folder.mkdir(parents=True)
        checksum = xxhash.xxh3_64_hexdigest(data if seal else blobs()[0])
        (file.folder / f"inner-00000001-{checksum}.safetensors").write_bytes(data)
        captured, problems = file.load()
        assert (captured is None) == bool(problems), "what cannot be used is named"
        assert captured is None or seal or data == blobs()[0], "a damaged checkpoint was loaded"
        return captured

    return parse


def array_targets() -> list[Target]:
    small, whole = blobs()
    refused = (PayloadError,)
    codecs = [Target(f"codec.{name}", _payloads(name), _decode(name), 2500, refused) for name in CODECS.names()]
    updates = [
        Target(f"vault.update.{name}", _sized(get_codec(name).size_max(512)), _prepare(name), 1000, refused)
        for name in CODECS.names()
    ]
    return [
        *codecs,
        *updates,
        Target("vault.whole", _sized(2048), _prepare_whole, 1000, refused),
        Target("inner.blob", mutated([small, whole]), _unpack, 1500, refused),
        Target("inner.header", _inner_of(1, "header"), _unpack, 2000, refused),
        Target("inner.about", _inner_of(0, "about"), _unpack, 1000, refused),
        Target("inner.tree", _inner_of(0, "structure"), _unpack, 1500, refused),
        Target("inner.tree_of_all", _inner_of(1, "structure"), _unpack, 500, refused),
        Target("checkpoint.torn", mutated([small]), _load_checkpoint(seal=False), 800),
        Target("checkpoint.sealed", mutated([small, whole]), _load_checkpoint(seal=True), 800),
    ]
