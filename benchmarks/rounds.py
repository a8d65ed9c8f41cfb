"""What durable commits cost: rounds per second of a real syncer at level `commit`, over those at `none`.

    python benchmarks/rounds.py                      # 100M parameters, 4 learners, levels in turn, three times
    python benchmarks/rounds.py --parameters 10 --seconds 5

A real `atoll syncer` process is driven over the real wire by learners that compute nothing: they answer every request
at once with a ready-made int4 contribution, fetch every update, and report steps as fast as the syncer keeps up. So the
rate is what the syncer and the wire can do on this machine, with the learners on the same cores. A run that also trains
is far below it, and its ratio is nearer to 1.

Three ways in turn: `none`; `slots`, level commit with 12 bytes per parameter of the fragment in every commit (Theta,
momentum, residual), as it was before there was a log; and `commit`, by the log. The floor of a commit is bytes over
bandwidth, at the disk's write speed, which is measured in the same run. `again_s` is how long a syncer that was killed
takes to read its state and to do the merges of the log again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.codec import get_codec
from atoll.core import (
    NO_VERSION,
    PROTOCOL_VERSION,
    FetchKind,
    FetchRequest,
    Hello,
    Progress,
    Published,
    PushHeader,
    PushKind,
    Ready,
    Request,
    Start,
    SyncConfig,
    TensorSpec,
    build_layout,
)
from atoll.errors import RefusedError
from atoll.syncer import read_committed
from atoll.wire import BulkClient, ClientOptions, ControlClient

FRAGMENTS = 24
ROW = 4096
STEP_S = 0.004
"""Pause between two reported steps: many more steps than rounds, so that pacing is never what limits the rate."""


class Puppet:
    """A learner that only speaks the protocol."""

    def __init__(self, name: str, address: str, tensors: tuple[TensorSpec, ...]) -> None:
        self.name, self.tensors = name, tensors
        self.options = ClientOptions(address=address)
        self.layout = build_layout(tensors, FRAGMENTS)
        dice = np.random.default_rng(len(name))
        made: dict[int, tuple[NDArray[np.uint8], int]] = {}
        for size in {fragment.size for fragment in self.layout.fragments}:
            values = dice.standard_normal(size, dtype=np.float32) * np.float32(1e-3)
            payload = get_codec("int4").encode(values)
            made[size] = payload, xxhash.xxh3_64_intdigest(payload.data)
        self.payloads = [made[fragment.size] for fragment in self.layout.fragments]
        self.versions = [0] * FRAGMENTS
        self.commits = 0
        self.tokens = 0
        self.seq = [0] * FRAGMENTS
        self.tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        self.bulk = BulkClient(self.options)
        async with ControlClient(self.options) as self.control:
            self.welcome = await self.control.open(Hello(self.name, self.name, PROTOCOL_VERSION, self.tensors))
            if self.welcome.seed:
                await self.push_seed()
            async for message in self.control:
                if isinstance(message, Start):
                    self.versions = [state.version for state in message.fragments]
                    self.control.send(Ready(message.step, tuple(self.versions)))
                    self.spawn(self.steps(message.step))
                elif isinstance(message, Request):
                    self.spawn(self.contribute(message))
                elif isinstance(message, Published):
                    self.spawn(self.adopt(message))

    def spawn(self, coroutine) -> None:  # type: ignore[no-untyped-def]
        task = asyncio.create_task(coroutine)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def steps(self, step: int) -> None:
        count = 0
        while True:
            await asyncio.sleep(STEP_S)
            count += 1
            self.tokens += 10
            message = Progress(step + count, count, self.tokens, int(STEP_S * 1e9), 1.0, tuple(self.versions))
            self.control.send(message)

    async def push_seed(self) -> None:
        for fragment in self.layout.fragments:
            values = np.zeros(fragment.size, np.float32).view(np.uint8)
            header = self.header(PushKind.SEED, fragment.index, 0, NO_VERSION, "fp32", values)
            await self.bulk.push(header, values)

    def header(  # type: ignore[no-untyped-def]
        self, kind: PushKind, fragment: int, seq: int, base: int, codec: str, data, checksum: int = 0, round_: int = 0
    ) -> PushHeader:
        count = 1 if kind is PushKind.CONTRIBUTION else 0
        return PushHeader(
            kind=kind,
            learner=self.name,
            generation=self.welcome.generation,
            fragment=fragment,
            round=round_,
            attempt=0,
            seq=seq,
            base_version=base,
            steps=count,
            tokens=count,
            codec=codec,
            size=int(data.nbytes),
            checksum=checksum or xxhash.xxh3_64_intdigest(data.data),
            secret=self.welcome.secret,
        )

    async def contribute(self, request: Request) -> None:
        fragment = request.fragment
        payload, checksum = self.payloads[fragment]
        seq = self.seq[fragment]
        self.seq[fragment] += 1
        base = self.versions[fragment]
        header = self.header(PushKind.CONTRIBUTION, fragment, seq, base, "int4", payload, checksum, request.round)
        await self.bulk.push(header, payload)

    async def adopt(self, message: Published) -> None:
        self.commits += 1
        who = (self.name, self.welcome.generation, message.fragment, message.version)
        request = FetchRequest(FetchKind.UPDATE, *who, secret=self.welcome.secret)
        try:
            await self.bulk.fetch(request)
        except RefusedError:
            pass  # it left the ring: a real learner would fetch it whole
        self.versions[message.fragment] = max(self.versions[message.fragment], message.version)


async def measure(address: str, tensors: tuple[TensorSpec, ...], learners: int, seconds: float) -> float:
    """Rounds per second, after a warm-up, seen by the first learner."""
    puppets = [Puppet(f"puppet-{i}", address, tensors) for i in range(learners)]
    tasks = [asyncio.create_task(puppet.run()) for puppet in puppets]
    while puppets[0].commits < 2 * FRAGMENTS:
        for task in tasks:
            if task.done():
                task.result()
        await asyncio.sleep(0.05)
    began, commits = time.perf_counter(), puppets[0].commits
    await asyncio.sleep(seconds)
    rate = (puppets[0].commits - commits) / (time.perf_counter() - began)
    for task in [*tasks, *(t for p in puppets for t in p.tasks)]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rate


def run_level(
    level: str, folder: Path, arguments: argparse.Namespace, tensors: tuple[TensorSpec, ...]
) -> dict[str, float]:
    folder.mkdir()
    config = SyncConfig(
        fragments=FRAGMENTS,
        sync_every=arguments.sync_every,
        overlap=arguments.overlap,
        quorum="all",
        learners_expected=arguments.learners,
        norm_outlier_factor=1e30,
    )
    command = [sys.executable, "-m", "atoll", "syncer", "--listen", "127.0.0.1:0", "--run-folder", str(folder)]
    command += ["--learners", str(config.learners_expected), "--fragments", str(FRAGMENTS), "--quorum", "all"]
    command += ["--sync-every", str(config.sync_every), "--overlap", str(config.overlap)]
    command += ["--durability", "none" if level == "none" else "commit", "--new-run"]
    environment = dict(os.environ)
    if level == "slots":
        environment["ATOLL_PRELOAD"] = "slots_only"
        environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        while not (folder / "syncer.json").exists():
            time.sleep(0.05)
        address = json.loads((folder / "syncer.json").read_text())["address"]
        rate = asyncio.run(measure(address, tensors, arguments.learners, arguments.seconds))
    finally:
        process.kill()
        process.wait()
    stored = [json.loads(line) for path in (folder / "events").glob("*.jsonl") for line in path.open()]
    commits = [line for line in stored if line["kind"] == "committed" and line["store_bytes"]]
    result = {"rounds_per_s": rate}
    if commits:
        result["bytes"] = statistics.mean(line["store_bytes"] for line in commits)
        result["store_ms"] = statistics.median(line["store_ns"] for line in commits) / 1e6
    merges = [line["merge_ns"] for line in stored if line["kind"] == "committed"]
    result["merge_ms"] = statistics.median(merges) / 1e6
    if commits:
        began = time.perf_counter()
        read_committed(folder / "state")
        result["again_s"] = time.perf_counter() - began
    return result


def disk_speed(folder: Path, size: int) -> float:
    """Bytes per second of plain pwrite and fdatasync of one commit's bytes."""
    data = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    file = os.open(folder / "probe", os.O_RDWR | os.O_CREAT)
    times = []
    for _ in range(8):
        began = time.perf_counter()
        os.pwrite(file, data.data, 0)
        os.fdatasync(file)
        times.append(time.perf_counter() - began)
    os.close(file)
    return size / statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100.0, help="millions")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--sync-every", type=int, default=24)
    parser.add_argument("--overlap", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=None, help="where the run folders go; default: a temporary one")
    arguments = parser.parse_args()
    rows = int(arguments.parameters * 1e6) // ROW
    tensors = tuple(TensorSpec(f"w{i}", (rows // FRAGMENTS, ROW), "float32") for i in range(FRAGMENTS))
    parameters = sum(rows // FRAGMENTS * ROW for _ in tensors)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        speed = disk_speed(Path(name), 12 * parameters // FRAGMENTS)
        rates: dict[str, list[dict[str, float]]] = {"none": [], "slots": [], "commit": []}
        for number in range(arguments.repeat):
            for level, results in rates.items():
                results.append(run_level(level, Path(name) / f"{level}-{number}", arguments, tensors))
                print(level, {k: round(v, 2) for k, v in results[-1].items()}, flush=True)
    ratios = [c["rounds_per_s"] / n["rounds_per_s"] for n, c in zip(rates["none"], rates["commit"], strict=True)]
    bytes_ = rates["commit"][-1]["bytes"]
    print(f"{parameters / 1e6:.1f}M parameters, {arguments.learners} learners, {FRAGMENTS} fragments")
    print(f"{'level':8} {'rounds/s':>9} {'merge ms':>9} {'store ms':>9} {'bytes/commit':>13} {'again s':>8}")
    for level, results in rates.items():
        middle = {k: statistics.median(r[k] for r in results) for k in results[0]}
        print(
            f"{level:8} {middle['rounds_per_s']:9.2f} {middle['merge_ms']:9.2f} "
            f"{middle.get('store_ms', 0):9.2f} {middle.get('bytes', 0):13,.0f} {middle.get('again_s', 0):8.2f}"
        )
    before = [s["rounds_per_s"] / n["rounds_per_s"] for n, s in zip(rates["none"], rates["slots"], strict=True)]
    print(f"ratio slots/none: median {statistics.median(before):.2f}, each {[round(r, 2) for r in before]}")
    print(f"ratio commit/none: median {statistics.median(ratios):.2f}, each {[round(r, 2) for r in ratios]}")
    print(f"disk: {speed / 1e6:.0f} MB/s, so the floor of a commit is {bytes_ / speed * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
