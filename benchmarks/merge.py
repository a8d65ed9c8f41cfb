"""How close is the merge to the speed of memory? Compares it with a large copy in the same run, interleaved with it.

    python benchmarks/merge.py [--params 64] [--contributions 8] [--threads 1 2] [--repeats 7] [--codec int4]
                               [--correction none]

A rate is the bytes that must be touched (each input read once, each output written once) over the best time of several
repetitions. The comparison is np.copyto between arrays of the fragment's size, bytes read and written, cut over the
same number of threads; its best repetition counts too. The fragment is one RDA slice of 3/4 and one mean slice of 1/4.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from atoll import kernels
from atoll.codec import (
    BLOCK,
    GradientSample,
    OuterRates,
    OuterTarget,
    Partial,
    agreement,
    get_codec,
    merge_fragment,
    reduce,
)
from atoll.core import CODECS, CORRECTIONS

UNIQUE = 1 << 20  # random numbers are made once and repeated


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=64, help="millions (2^20) of parameters in the fragment")
    parser.add_argument("--contributions", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--codec", choices=CODECS.names(), default="int4", help="of contributions and of the downlink")
    parser.add_argument("--correction", choices=CORRECTIONS, default="none")
    arguments = parser.parse_args()
    bench = Bench(arguments.params << 20, arguments.contributions, arguments.codec, arguments.correction)
    codecs = f"{arguments.contributions} {arguments.codec} contributions, {arguments.codec} downlink"
    print(f"{arguments.params}Mi parameters, {codecs}, correction {arguments.correction}")
    print(f"bytes that must be touched by a merge: {bench.merge_bytes:.2f} per parameter\n")
    print("| threads | stage | ms | Gparam/s | GB/s | of the copy |\n|---|---|---|---|---|---|")
    for threads in arguments.threads:
        bench.table(threads, arguments.repeats)
    state = bench.theta.nbytes + bench.momentum.nbytes
    state += 0 if bench.residual is None else bench.residual.nbytes
    sample = bench.sample.values.nbytes if bench.sample else 0
    print(f"\nstate: {state / bench.n:.2f} bytes per parameter, and {sample / bench.n:.2f} for the gradient sample")
    print(f"contributions: {sum(p.nbytes for p in bench.payloads) / bench.n:.2f} bytes per parameter")
    print(f"peak RSS before the first merge: {bench.peak_before:.0f} MiB; grown by all stages: {bench.grown:.0f} MiB")


class Bench:
    """The arrays of one fragment, and the stages that work on them."""

    def __init__(self, n: int, contributions: int, codec: str, correction: str) -> None:
        self.n, self.codec, rng = n, get_codec(codec), np.random.default_rng(0)
        self.correction = correction
        self.encoded_bytes = self.codec.size_max(n) / n  # per parameter
        self.merge_bytes = (contributions + 1) * self.encoded_bytes + (16 if self.codec.lossless else 24)
        kernels.warm_up()
        self.payloads = [
            self.codec.encode(np.resize(rng.standard_normal(UNIQUE, dtype=np.float32) * np.float32(0.01), n))
            for _ in range(contributions)
        ]
        self.slices = np.array([0, n // BLOCK * 3 // 4, n // BLOCK])
        self.norms = [self.codec.inspect(payload, n, self.slices)[1] for payload in self.payloads]
        self.theta, self.target = (np.resize(rng.standard_normal(UNIQUE, dtype=np.float32), n) for _ in range(2))
        self.momentum = np.full(n, 1e-3, np.float32)
        self.residual = None if self.codec.lossless else np.full(n, 1e-5, np.float32)
        self.sample: GradientSample | None = None
        self.peak_before = self.grown = 0.0

    def reduced(self) -> Partial:
        return reduce(self.payloads, self.codec.name, [1.0] * len(self.payloads), self.norms, self.slices)

    def compare(self) -> None:
        names = [str(number) for number in range(len(self.payloads))]
        agreement(self.reduced(), names, names)

    def merge(self) -> None:
        self.sample = merge_fragment(
            self.reduced(),
            ["rda", "mean"],
            OuterTarget(self.theta, {"momentum": self.momentum}, self.residual),
            codec_down=self.codec.name,
            rates=OuterRates(0.7, 0.5),
            previous=self.sample,
            correction=self.correction,
        ).sample

    def copy(self, pool: ThreadPoolExecutor, threads: int) -> None:
        edges = [self.n * i // threads for i in range(threads + 1)]
        list(pool.map(lambda a, b: np.copyto(self.target[a:b], self.theta[a:b]), edges, edges[1:]))

    def table(self, threads: int, repeats: int) -> None:
        kernels.set_threads(threads)
        self.peak_before = self.peak_before or peak_mib()
        with ThreadPoolExecutor(threads) as pool:
            stages: dict[str, tuple[float, Callable[[], object]]] = {
                "large copy": (8.0, lambda: self.copy(pool, threads)),
                "merge, outer step, downlink": (self.merge_bytes, self.merge),
                "compare (robust=cosine)": (2 * len(self.payloads) * self.encoded_bytes + 8, self.compare),
                "inspect one contribution": (
                    self.encoded_bytes,
                    lambda: self.codec.inspect(self.payloads[0], self.n, self.slices),
                ),
                "encode_delta (learner)": (
                    16 + self.encoded_bytes,
                    lambda: self.codec.encode_delta(self.theta, self.target, self.residual),
                ),
                "decode_add (learner)": (
                    8 + self.encoded_bytes,
                    lambda: self.codec.decode_add(self.payloads[0], self.target),
                ),
            }
            best = dict.fromkeys(stages, float("inf"))
            for _ in range(repeats):
                for name, (_, stage) in stages.items():
                    start = time.perf_counter()
                    stage()
                    best[name] = min(best[name], time.perf_counter() - start)
        self.grown = peak_mib() - self.peak_before
        copied = 8.0 * self.n / best["large copy"]
        for name, (per_parameter, _) in stages.items():
            rate = per_parameter * self.n / best[name]
            speed, ms = self.n / best[name] / 1e9, best[name] * 1e3
            print(f"| {threads} | {name} | {ms:.1f} | {speed:.2f} | {rate / 1e9:.1f} | {rate / copied:.2f} |")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
