"""What codecs take on this machine, beside the floor that its memory sets, and what is left in their payloads.

    python benchmarks/codecs.py                       4.2M values, one thread
    python benchmarks/codecs.py --values 1048576
    python benchmarks/codecs.py --recording RUN       the entropy of the payloads of a run that was made with --record

The floor of an operation is the bytes that it must read and write, over the bandwidth of a plain copy in the same run.
Entropy is that of single bytes of the codes, and of the scales: what a coder without memory could save.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from atoll import kernels
from atoll.codec import get_codec
from atoll.codec.fragments import Matrix

REPEATS = 7
NAMES = ("fp32", "int8", "int4", "int2", "topk:1%", "topk:3%", "topk:10%", "topk:3%:int4", "lowrank:4")


def best(work: Callable[[], object]) -> float:
    """Milliseconds, the fastest of some: on a busy machine the others measure the neighbours."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - began))
    return min(times)


def speeds(n: int) -> None:
    dice = np.random.default_rng(0)
    after, before, residual = (dice.standard_normal(n).astype(np.float32) for _ in range(3))
    target = after.copy()
    bandwidth = 8 * n / best(lambda: np.copyto(target, before))  # bytes per ms, read and written
    side = int(n**0.5) // 256 * 256
    print(f"{n:,} values, {kernels.threads()} thread(s), a copy moves {bandwidth / 1e6:.1f} GB/s")
    print(f"{'codec':14} {'bits':>6} {'encode ms':>10} {'floor':>6} {'decode+add':>11} {'floor':>6} {'merge of 8':>11}")
    for name in NAMES:
        codec = get_codec(name)
        if hasattr(codec, "shaped"):
            codec = codec.shaped((Matrix(0, side, side),))
        payload, _ = codec.encode_delta(after, before, residual)
        encode = best(lambda: codec.encode_delta(after, before, residual))  # noqa: B023
        decode = best(lambda: codec.decode_add(payload, target))  # noqa: B023
        eight, ones = [payload] * 8, np.full((1, 8), 0.125)
        merge = best(lambda: codec.accumulate(eight, ones, np.array([0, n // 256])))  # noqa: B023
        floors = [(moved * n + payload.nbytes) / bandwidth for moved in (16, 8)]
        bits = 8 * payload.nbytes / n
        row = f"{name:14} {bits:6.2f} {encode:10.2f} {floors[0]:6.2f} {decode:11.2f} {floors[1]:6.2f} {merge:11.2f}"
        print(row, flush=True)


def entropy(data: np.ndarray) -> float:
    """Bits per byte."""
    shares = np.bincount(data, minlength=256) / max(1, data.size)
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def leftovers(run: Path) -> None:
    """The payloads of a recording, by codec."""
    from atoll.instruments.replay.recording_reader import SegmentReader
    from atoll.store import RECORDING_FOLDER, SegmentFile

    found: dict[str, list[np.ndarray]] = {}
    for path in sorted((run / "state" / RECORDING_FOLDER).glob("recording-*-*.log")):
        _, epoch, number = path.stem.split("-")
        reader = SegmentReader(SegmentFile(int(epoch), int(number), path))
        for record in reader.records():
            if record.kind == "payload":
                body = np.empty(record.body_bytes, np.uint8)
                reader.read_body(record, 0, body, record.head["checksum"])
                found.setdefault(str(record.head["codec"]), []).append(body)
    for name, payloads in found.items():
        whole = np.concatenate(payloads)
        codes = np.concatenate([p[p.size * 4 // (4 + {"int4": 128, "int2": 64}.get(name, 252)) :] for p in payloads])
        began = time.perf_counter()
        packed = len(zlib.compress(whole.tobytes(), 1))
        rate = whole.nbytes / (time.perf_counter() - began) / 1e6
        print(
            f"{name}: {len(payloads)} payloads, {whole.nbytes:,} bytes; {entropy(codes):.2f} bits per byte of codes; "
            f"zlib -1: {1 - packed / whole.nbytes:.1%} less at {rate:.0f} MB/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--recording", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    kernels.set_threads(arguments.threads)
    if arguments.recording is not None:
        leftovers(arguments.recording)
    else:
        speeds(arguments.values // 256 * 256)


if __name__ == "__main__":
    main()
