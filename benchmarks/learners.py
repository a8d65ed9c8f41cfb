"""How many learners one syncer keeps up with: due rounds that are merged, and the cores that it takes.

    python benchmarks/learners.py                                    # 16, 64, 256 and 1,024 learners, 1 s steps
    python benchmarks/learners.py --learners 1024 --parameters 0.2   # the control plane alone: small contributions
    python benchmarks/learners.py --learners 1024 --shards 4         # payloads go to shards
    python benchmarks/learners.py --learners 4096 --relays 16 --parameters 0.2
    python benchmarks/learners.py --learners 64 --seconds 10 --processes 2

As in rounds.py, learners compute nothing and only speak the protocol; several share a process, and those processes use
cores of their own. Every learner takes a step in each `--step-s` seconds, at a moment of its own. With P = H one round
falls due per step. The table says how many of those were merged, how many of the learners were in a merge, and how long
all of them took to join at once. Cores are of the syncer alone: shards and relays have their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from relay import start_relay
from shards import RoutedPuppet, begin, start, wait_for

from atoll.codec import get_codec
from atoll.core import (
    INLINE_BYTES_MAX,
    InlinePush,
    Progress,
    Published,
    PushHeader,
    PushKind,
    Request,
    TensorSpec,
    build_layout,
)
from atoll.errors import UnreachableError
from atoll.wire import ClientOptions

PERIOD = 8
"""H and P: one fragment falls due in each step."""
ROW = 1024
WAIT_S = 300.0


class SteadyPuppet(RoutedPuppet):
    """A learner of a given pace. What all of them send is made once per process."""

    def __init__(self, name: str, address: str, tensors: tuple[TensorSpec, ...], step_s: float, made: Made) -> None:
        self.name, self.tensors, self.step_s = name, tensors, step_s
        self.options = ClientOptions(address=address)
        self.layout, self.payloads = made.layout, made.payloads
        self.versions, self.seq = [0] * PERIOD, [0] * PERIOD
        self.commits = self.tokens = self.count = 0
        self.given = [0] * PERIOD  # steps that are in a contribution already
        self.tasks: set[asyncio.Task[None]] = set()
        self.joined = asyncio.Event()

    async def steps(self, step: int) -> None:
        self.joined.set()
        await asyncio.sleep(random.random() * self.step_s)
        while True:
            self.count += 1
            self.tokens += 10
            pace_ns, bases = int(self.step_s * 1e9), tuple(self.versions)
            self.control.send(Progress(step + self.count, self.count, self.tokens, pace_ns, 1.0, bases))
            await asyncio.sleep(self.step_s)

    async def contribute(self, request: Request) -> None:
        fragment = request.fragment
        payload, checksum = self.payloads[fragment]
        fresh, self.given[fragment] = self.count - self.given[fragment], self.count
        if not fresh:
            fresh, self.given[fragment] = 1, self.count + 1
        base, seq = self.versions[fragment], self.seq[fragment]
        self.seq[fragment] += 1
        header = self.header(PushKind.CONTRIBUTION, fragment, seq, base, "int4", payload, checksum, request.round)
        header.steps, header.tokens = fresh, 10 * fresh  # plain when it runs (core/values.py)
        if payload.nbytes <= INLINE_BYTES_MAX:
            self.control.send(InlinePush(header, payload.tobytes()))
        else:
            await self.push(header, payload)

    async def push(self, header: PushHeader, payload: NDArray[np.uint8]) -> None:
        """A server closes the oldest of more than 256 connections from one address that have not spoken yet, and here
        all come from one: as a learner does, try again."""
        for pause_s in (0.5, 1.0, 2.0, 4.0):
            try:
                await self.bulk.push(header, payload)
                return
            except UnreachableError:
                await asyncio.sleep(pause_s * (0.5 + random.random()))

    async def adopt(self, message: Published) -> None:
        if message.update:
            self.commits += 1
            self.versions[message.fragment] = max(self.versions[message.fragment], message.version)
        else:
            await super().adopt(message)


class Made:
    """The layout, and one contribution for each fragment, for all puppets of a process."""

    def __init__(self, tensors: tuple[TensorSpec, ...]) -> None:
        self.layout = build_layout(tensors, PERIOD)
        dice, self.payloads = np.random.default_rng(0), []
        for fragment in self.layout.fragments:
            values = (dice.standard_normal(fragment.size) * 1e-3).astype(np.float32)
            payload, _ = get_codec("int4").encode_delta(values, np.zeros_like(values), None)
            self.payloads.append((payload, xxhash.xxh3_64_intdigest(payload.data)))


async def drive(first: int, count: int, addresses: list[str], tensors: tuple[TensorSpec, ...], step_s: float) -> None:
    """So many puppets, until the process is ended. Says when all of them have joined."""
    made = Made(tensors)
    places = [addresses[n % len(addresses)] for n in range(first, first + count)]
    names = [f"puppet-{n:05}" for n in range(first, first + count)]
    puppets = [SteadyPuppet(*who, tensors, step_s, made) for who in zip(names, places, strict=True)]
    tasks = [asyncio.create_task(puppet.run()) for puppet in puppets]
    waits = [asyncio.create_task(puppet.joined.wait()) for puppet in puppets]
    await asyncio.wait_for(asyncio.gather(*waits), WAIT_S)
    print("joined", flush=True)
    await asyncio.gather(*tasks)


def tensors_of(millions: float) -> tuple[TensorSpec, ...]:
    rows = max(1, int(millions * 1e6) // ROW // PERIOD)
    return tuple(TensorSpec(f"w{i}", (rows, ROW), "float32") for i in range(PERIOD))


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def commits_of(folder: Path) -> list[dict[str, object]]:
    lines = [line for path in sorted((folder / "events").glob("*.jsonl")) for line in path.open()]
    return [event for event in map(json.loads, lines) if event["kind"] == "committed"]


def run(learners: int, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    sync = ["--fragments", str(PERIOD), "--sync-every", str(PERIOD), "--learners", str(learners)]
    sync += ["--durability", arguments.durability, "--quorum", arguments.quorum]
    folder.mkdir()
    puppets: list[subprocess.Popen[str]] = []
    others: list[subprocess.Popen[bytes]] = []
    try:
        places = [(folder / f"shard-{n}", "shard.json") for n in range(arguments.shards)]
        others += [begin(*place, "shard", "--listen", "127.0.0.1:0") for place in places]
        shards = [wait_for(*place, shard)[1] for place, shard in zip(places, others, strict=True)]
        sync += ["--shards", ",".join(shards)] if shards else []
        syncer, address = start(folder / "run", "syncer.json", "syncer", "--listen", "127.0.0.1:0", *sync, "--new-run")
        others.append(syncer)
        relays = [start_relay(address, ()) for _ in range(arguments.relays)]
        others += [relay for relay, _ in relays]
        addresses = ",".join(where for _, where in relays) or address
        processes = min(learners, arguments.processes)
        shares = [range(n * learners // processes, (n + 1) * learners // processes) for n in range(processes)]
        began = time.perf_counter()
        for share in shares:
            mine = ["--puppets", f"{share.start},{len(share)}", "--address", addresses]
            mine += ["--parameters", str(arguments.parameters), "--step-s", str(arguments.step_s)]
            puppets.append(subprocess.Popen([sys.executable, __file__, *mine], stdout=subprocess.PIPE, text=True))
        for puppet in puppets:
            assert puppet.stdout is not None and puppet.stdout.readline().strip() == "joined"
        joined_s = time.perf_counter() - began
        time.sleep(2 * PERIOD * arguments.step_s)
        before, used, since = len(commits_of(folder / "run")), cpu_s(syncer.pid), time.perf_counter()
        time.sleep(arguments.seconds)
        took, used = time.perf_counter() - since, cpu_s(syncer.pid) - used
        commits = commits_of(folder / "run")[before:]
    finally:
        for process in (*puppets, *others):
            process.kill()
            process.wait()
    in_each = [len(event["contributors"]) for event in commits]  # type: ignore[arg-type]
    return {
        "joined_s": joined_s,
        "due": took / arguments.step_s,
        "merged": len(commits),
        "share": len(commits) / (took / arguments.step_s),
        "contributors": statistics.median(in_each) if in_each else 0,
        "cores": used / took,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--learners", default="16,64,256,1024")
    parser.add_argument("--parameters", type=float, default=4.0, help="millions")
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, default=24.0)
    parser.add_argument("--processes", type=int, default=8, help="that the puppets share")
    parser.add_argument("--shards", type=int, default=0)
    parser.add_argument("--relays", type=int, default=0, help="that the learners share")
    parser.add_argument("--durability", default="none")
    parser.add_argument("--quorum", default="50%")
    parser.add_argument("--puppets", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tensors = tensors_of(arguments.parameters)
    if arguments.puppets:
        first, count = map(int, arguments.puppets.split(","))
        asyncio.run(drive(first, count, arguments.address.split(","), tensors, arguments.step_s))
        return
    print(f"{arguments.parameters:g}M parameters, H = P = {PERIOD}, {arguments.step_s:g} s steps")
    print(f"{'learners':>8} {'joined s':>9} {'due':>5} {'merged':>7} {'share':>6} {'in each':>8} {'syncer cores':>13}")
    for learners in map(int, arguments.learners.split(",")):
        with tempfile.TemporaryDirectory() as name:
            got = run(learners, Path(name) / "run", arguments)
        print(
            f"{learners:8} {got['joined_s']:9.1f} {got['due']:5.0f} {got['merged']:7.0f} {got['share']:6.2f} "
            f"{got['contributors']:8.0f} {got['cores']:13.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
