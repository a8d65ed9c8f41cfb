"""What a GPU takes for a learner's arithmetic on one fragment, beside its memory's floor and the CPU's own kernels.

    python benchmarks/device_codec.py                  12.4M values: a fragment of 99M parameters with P = 8
    python benchmarks/device_codec.py --values 4194304

The floor of an operation is the bytes that it must read and write over the bandwidth of a plain copy in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from atoll import kernels
from atoll.learner.arithmetic import HostArithmetic
from atoll.learner.torch_arithmetic import TorchArithmetic

REPEATS = 30


def on_device(work: Callable[[], object]) -> float:
    """Milliseconds of the device, median."""
    times = []
    for _ in range(REPEATS):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times)


def on_clock(work: Callable[[], object]) -> float:
    """Milliseconds until the result is there, median."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--values", type=int, default=12_435_456)
    n = parser.parse_args().values // 256 * 256
    device = torch.device("cuda")
    dice = np.random.default_rng(0)
    after, before, residual = (dice.standard_normal(n).astype(np.float32) for _ in range(3))
    there = [torch.from_numpy(x).to(device) for x in (after, before, residual)]
    device_arithmetic, host_arithmetic = TorchArithmetic(device, [[]]), HostArithmetic()
    kernels.warm_up()
    copy_ms = on_device(lambda: there[0].clone())
    bytes_ms = 8 * n / copy_ms
    print(f"{n:,} values; a plain copy: {copy_ms:.3f} ms, {bytes_ms / 1e6:.0f} GB/s")
    print("| operation | GPU ms | floor ms | until the bytes are on the host, ms | one CPU thread, ms |")
    print("|---|---|---|---|---|")
    for codec in ("int4", "int8"):
        payload = host_arithmetic.encoded(codec, after, before, residual, feedback=True)[0]
        data = torch.from_numpy(payload.copy()).to(device)
        rows = [
            (
                f"encode {codec}",
                lambda codec=codec: device_arithmetic._encode(codec, *there, True),
                16 * n + payload.nbytes,
                lambda codec=codec: device_arithmetic.encoded(codec, *there, feedback=True),
                lambda codec=codec: host_arithmetic.encoded(codec, after, before, residual, feedback=True),
            ),
            (
                f"update {codec}",
                lambda codec=codec, data=data: device_arithmetic.add(there[0], codec, data),
                8 * n + payload.nbytes,
                lambda codec=codec, payload=payload: device_arithmetic.updated(there[0], codec, payload),
                lambda codec=codec, payload=payload: host_arithmetic.updated(after, codec, payload),
            ),
        ]
        for name, kernel, moved, whole, host in rows:
            print(
                f"| {name} | {on_device(kernel):.3f} | {moved / bytes_ms:.3f} | {on_clock(whole):.2f} | "
                f"{on_clock(host):.1f} |"
            )
    moves = [(there[0], there[2])]
    kernel_ms = on_clock(lambda: device_arithmetic.rebased(there[0], there[1], moves))
    host_ms = on_clock(lambda: host_arithmetic.rebased(after, before, [(after, residual)]))
    print(f"| rebase | {kernel_ms:.3f} (with its launch) | {20 * n / bytes_ms:.3f} | | {host_ms:.1f} |")


if __name__ == "__main__":
    main()
