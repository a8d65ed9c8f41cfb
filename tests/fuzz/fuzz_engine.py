"""A small seeded fuzzer: mutate valid samples, parse, and let nothing but the documented errors pass.

A case is (parser, seed, number) and always gives the same bytes. A failure prints all three, the bytes in hexadecimal
and the command that parses them again:

    python tests/fuzz/fuzz_replay.py PARSER HEX

What counts as a failure: an exception that the parser does not document, a peak of memory above the parser's bound, a
parser that does not come back (a watchdog ends it), and whatever the parser's own check says of what it accepted.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

HANG_S = 60
"""A case that takes this long counts as a hang. Cases take less than a millisecond: no slow machine comes near it."""
MEMORY_EVERY = 37
"""One case in this many is run under tracemalloc, which makes it several times slower. Prime, so that the sample does
not fall in step with anything."""
CASES_VARIABLE = "ATOLL_FUZZ_CASES"
"""How many cases the soak runs for each parser."""
SEED_VARIABLE = "ATOLL_FUZZ_SEED"

Make = Callable[[Random], bytes]
"""Bytes of one case."""


@dataclass(frozen=True)
class Target:
    """One parser of bytes that come from outside."""

    name: str
    make: Make
    parse: Callable[[bytes], Any]
    """Raises only `allowed`."""
    cases: int
    """In the default run."""
    allowed: tuple[type[Exception], ...] = ()
    check: Callable[[Any], None] | None = None
    """Looks at what was accepted; raises AssertionError."""
    memory: Callable[[int], int] = lambda size: 2**20 + 64 * size
    """The most bytes that parsing so many bytes may allocate."""


class Hang(BaseException):
    """Raised by the watchdog. No parser catches it."""


@contextlib.contextmanager
def watchdog(seconds: int) -> Iterator[None]:
    """End the block by Hang when it takes longer. Does nothing where signals cannot be had (other threads)."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(target: Target, seed: int, cases: int) -> int:
    """Run so many cases; returns how many were accepted. Raises AssertionError with all that is needed to replay."""
    accepted = 0
    for number in range(cases):
        data = target.make(Random(f"{target.name}/{seed}/{number}"))
        accepted += run_one(
            target, data, f"seed {seed}, case {number}", measure=number % MEMORY_EVERY == MEMORY_EVERY - 1
        )
    return accepted


def run_one(target: Target, data: bytes, where: str, *, measure: bool = False) -> bool:
    """Parse `data`; returns whether it was accepted."""
    try:
        with watchdog(HANG_S):
            if measure:
                tracemalloc.start()
            try:
                result = target.parse(data)
                if target.check is not None:
                    target.check(result)
            finally:
                peak = tracemalloc.get_traced_memory()[1] if measure else 0
                if measure:
                    tracemalloc.stop()
    except target.allowed:
        _demand(target, data, where, peak)
        return False
    except (Exception, Hang) as error:
        raise AssertionError(f"{told(target, data, where)}\n{type(error).__name__}: {str(error)[:500]}") from error
    _demand(target, data, where, peak)
    return True


def _demand(target: Target, data: bytes, where: str, peak: int) -> None:
    allowed = target.memory(len(data))
    if peak > allowed:
        raise AssertionError(f"{told(target, data, where)}\nit took {peak} bytes of memory, {allowed} are allowed")


def told(target: Target, data: bytes, where: str) -> str:
    return (
        f"parser {target.name!r}, {where}, {len(data)} bytes: {data.hex()}\n"
        f"again: python tests/fuzz/fuzz_replay.py {target.name!r} HEX"
    )


def soak_cases(default: int = 20_000) -> int:
    return int(os.environ.get(CASES_VARIABLE, default))


def soak_seed() -> int:
    return int(os.environ.get(SEED_VARIABLE, 1))


# ---------------------------------------------------------------- bytes

SIZES = (0, 1, 2, 7, 8, 255, 256, 4095, 4096, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
"""Lengths and counters with which parsers have been broken: off by one, sign bits, more than any memory."""


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _flip(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _set_byte(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    if data:
        data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x5B, 0x7B, rng.randrange(256)))


def _truncate(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[rng.randrange(len(data) + 1) :]


def _behead(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    del data[: rng.randrange(len(data) + 1)]


def _delete(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 17)]


def _insert(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.randbytes(rng.randrange(1, 17))


def _repeat(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + rng.randrange(1, 65)] * rng.choice((1, 2, 30))


def _splice(rng: Random, data: bytearray, samples: Sequence[bytes]) -> None:
    other = rng.choice(samples)
    data[rng.randrange(len(data) + 1) :] = other[rng.randrange(len(other) + 1) :]


def _fixed_length(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    """Something that may be a 4 or 8 byte length field gets a value that cannot be true."""
    width = rng.choice((4, 8))
    if len(data) >= width:
        start = rng.choice((0, 8, 12, rng.randrange(len(data) - width + 1)))
        value = (rng.choice(SIZES) + rng.choice((0, 0, -1, 1))) % 2 ** (8 * width)
        data[start : start + width] = value.to_bytes(width, "little")


def _varint_length(rng: Random, data: bytearray, _: Sequence[bytes]) -> None:
    start = rng.randrange(len(data) + 1)
    long = rng.choice((varint(rng.choice(SIZES)), b"\xff" * 9 + b"\x01", b"\xff" * 11, b"\x80" * 9 + b"\x00"))
    data[start : start + rng.choice((0, 1, 2))] = long


MUTATIONS = (
    *(_flip, _flip, _flip, _set_byte, _truncate, _behead, _delete, _insert),
    *(_repeat, _splice, _fixed_length, _fixed_length, _varint_length),
)


def mutated(samples: Sequence[bytes]) -> Make:
    """One to four mutations of a sample; sometimes none at all, or nothing but noise."""

    def make(rng: Random) -> bytes:
        kind = rng.random()
        if kind < 0.02:
            return rng.randbytes(rng.choice((0, 1, 8, 64, 500)))
        data = bytearray(rng.choice(samples))
        if kind > 0.97:
            return bytes(data)
        for _ in range(rng.choice((1, 1, 2, 4))):
            rng.choice(MUTATIONS)(rng, data, samples)
        return bytes(data)

    return make


# ---------------------------------------------------------------- JSON

ODD = (
    *(
        "null",
        "true",
        "false",
        "0",
        "1",
        "-1",
        "2.5",
        "-0.0",
        str(2**31),
        str(2**53),
        str(2**62),
        str(2**63),
        str(2**64),
    ),
    *(
        "1" + "0" * 400,
        "-1" + "0" * 400,
        "1" * 4400,
        "1e308",
        "1e999",
        "NaN",
        "Infinity",
        "-Infinity",
        '""',
        '"x"',
        '"0"',
    ),
    *(
        '"\\ud800"',
        '"\\u0000"',
        '"' + "y" * 3000 + '"',
        "[]",
        "{}",
        "[[]]",
        '{"a":1}',
        "[1,2,3]",
        '["a"]',
        "[null,null,null]",
    ),
    *(
        "[" * 60 + "]" * 60,
        "[" * 3000 + "]" * 3000,
        '{"a":' * 2000 + "1" + "}" * 2000,
        "[" * 200_000,
        '"' + "9" * 30 + '"',
    ),
)
"""Values that are JSON, or what Python takes for it, and not what was expected."""
_MARK = "\u241fRAW\u241f"


def mutated_json(samples: Sequence[bytes], seal: Callable[[bytes], bytes] = lambda document: document) -> Make:
    """Samples with values exchanged, dropped, renamed or doubled; `seal` makes it whole again (lengths, checksums)."""
    documents = [json.loads(sample) for sample in samples]
    by_bytes = mutated(samples)

    def make(rng: Random) -> bytes:
        if rng.random() < 0.15:
            return seal(by_bytes(rng))
        document = json.loads(json.dumps(rng.choice(documents)))
        holder = {"root": document}
        raws: list[str] = []
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            _mutate_tree(rng, holder, documents, raws)
        text = json.dumps(holder.get("root"), ensure_ascii=False)
        for index, raw in enumerate(raws):
            text = text.replace(f'"{_MARK}{index}{_MARK}"', raw)
        return seal(text.encode("utf-8", "surrogatepass"))

    return make


def _places(tree: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(container, key) of every value below `tree`."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        found.append((tree, key))
        _places(tree[key], found)
    return found


def _mutate_tree(rng: Random, holder: dict[str, Any], documents: Sequence[Any], raws: list[str]) -> None:
    container, key = rng.choice(_places(holder, []))
    kind = rng.randrange(10)
    if kind < 6:
        raws.append(rng.choice(ODD))
        container[key] = f"{_MARK}{len(raws) - 1}{_MARK}"
    elif kind == 6 and container is not holder:
        del container[key]
    elif kind == 7 and isinstance(container, dict) and container is not holder:
        container[rng.choice((f"{key}x", "", "9" * 30, "/"))] = container.pop(key)
    elif kind == 8 and isinstance(container, list):
        container[key:key] = [container[key]] * rng.choice((1, 3, 40))
    else:
        other = rng.choice(_places({"root": rng.choice(documents)}, []))
        container[key] = json.loads(json.dumps(other[0][other[1]]))


# ---------------------------------------------------------------- files

_scratch: list[tempfile.TemporaryDirectory[str]] = []


def scratch(name: str) -> Path:
    """A folder of this process, for parsers that read files. It goes when the process ends."""
    if not _scratch:
        _scratch.append(tempfile.TemporaryDirectory(prefix="atoll-fuzz-"))
    folder = Path(_scratch[0].name) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder
