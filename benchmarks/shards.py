"""What shards bring: payload bytes per second through S shards on one machine, and how long one needs to come back.

    python benchmarks/shards.py                                  # 400M parameters, 4 learners, S = 0, 1, 2, 4, 8
    python benchmarks/shards.py --parameters 7000 --shards 8 --seconds 10 --overlap 6      # 110 GB of memory
    python benchmarks/shards.py --parameters 1000 --shards 8 --durability commit --restart  # 48 GB of disk
    python benchmarks/shards.py --parameters 10 --shards 0,2 --seconds 5

As in rounds.py, learners compute nothing; each has a process of its own, so that one interpreter does not limit them.
S = 0 is the syncer alone. `--restart` kills a shard and says how long it took, from its start, until the coordinator
led it again. `shard GB` is the memory of the largest shard at the end, `disk GB` what all of them have on disk.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rounds import FRAGMENTS, ROW, Puppet

from atoll.core import PROTOCOL_VERSION, Hello, Published, Ready, Request, Start, TensorSpec
from atoll.wire import ClientOptions, ControlClient, RoutedBulk, fetch_status

WARM_COMMITS = FRAGMENTS
WAIT_S = 600.0


class RoutedPuppet(Puppet):
    """A learner that only speaks the protocol, and goes to shards where there are any."""

    async def run(self) -> None:
        self.bulk = RoutedBulk(self.options)  # type: ignore[assignment]
        async with ControlClient(self.options) as self.control:
            hello = Hello(self.name, self.name, PROTOCOL_VERSION, self.tensors, shards=True)
            self.welcome = await self.control.open(hello)
            self.bulk.route(self.welcome.shards, self.welcome.shard_of)  # type: ignore[attr-defined]
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


async def drive(name: str, address: str, tensors: tuple[TensorSpec, ...], seconds: float) -> dict[str, float]:
    """One puppet, measured from its first commits on."""
    puppet = RoutedPuppet(name, address, tensors)
    task = asyncio.create_task(puppet.run())
    while puppet.commits < WARM_COMMITS:
        if task.done():
            task.result()
        await asyncio.sleep(0.02)
    bulk = puppet.bulk
    began, commits, moved = time.perf_counter(), puppet.commits, bulk.bytes_up + bulk.bytes_down
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    result = {"rounds_per_s": (puppet.commits - commits) / took}
    result["bytes_per_s"] = (bulk.bytes_up + bulk.bytes_down - moved) / took
    task.cancel()
    return result


def tensors_of(millions: float) -> tuple[TensorSpec, ...]:
    rows = int(millions * 1e6) // ROW
    return tuple(TensorSpec(f"w{i}", (max(1, rows // FRAGMENTS), ROW), "float32") for i in range(FRAGMENTS))


def start(folder: Path, file: str, *argv: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process of the run, and the address that it announces."""
    return wait_for(folder, file, begin(folder, file, *argv))


def begin(folder: Path, file: str, *argv: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    (folder / file).unlink(missing_ok=True)
    log = (folder / "log").open("ab")
    return subprocess.Popen([sys.executable, "-m", "atoll", *argv, "--run-folder", str(folder)], stdout=log)


def wait_for(folder: Path, file: str, process: subprocess.Popen[bytes]) -> tuple[subprocess.Popen[bytes], str]:
    deadline = time.monotonic() + WAIT_S
    while not (folder / file).exists():
        assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
    return process, str(json.loads((folder / file).read_text())["address"])


def run(count: int, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    folder.mkdir()
    begun = [begin(folder / str(n), "shard.json", "shard", "--listen", "127.0.0.1:0") for n in range(count)]
    shards = [wait_for(folder / str(n), "shard.json", process) for n, process in enumerate(begun)]
    sync = ["--fragments", str(FRAGMENTS), "--quorum", "all", "--learners", str(arguments.learners), "--new-run"]
    sync += ["--sync-every", "24", "--overlap", str(arguments.overlap), "--durability", arguments.durability]
    if count:
        sync += ["--shards", ",".join(address for _, address in shards)]
    syncer, address = start(folder / "run", "syncer.json", "syncer", "--listen", "127.0.0.1:0", *sync)
    common = ["--address", address, "--parameters", str(arguments.parameters), "--seconds", str(arguments.seconds)]
    puppets = [
        subprocess.Popen([sys.executable, __file__, "--puppet", f"puppet-{n}", *common], stdout=subprocess.PIPE)
        for n in range(arguments.learners)
    ]
    try:
        told = [json.loads(puppet.communicate(timeout=WAIT_S)[0]) for puppet in puppets]
        result = {"rounds_per_s": told[0]["rounds_per_s"], "bytes_per_s": sum(one["bytes_per_s"] for one in told)}
        result["shard_gb"] = max((memory_gb(shard.pid) for shard, _ in shards), default=memory_gb(syncer.pid))
        result["disk_gb"] = sum(path.stat().st_blocks for path in folder.glob("*/state/*/*")) * 512 / 1e9
        if arguments.restart and count:
            result["restart_s"] = restart(folder, shards, address)
        return result
    finally:
        for process in (*puppets, syncer, *(shard for shard, _ in shards)):
            process.kill()
            process.wait()


def memory_gb(pid: int) -> float:
    """Resident memory of a process at its highest."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    return 0.0


def restart(folder: Path, shards: list[tuple[subprocess.Popen[bytes], str]], address: str) -> float:
    """Seconds from a shard's start to the moment when the coordinator leads it again."""
    shards[0][0].kill()
    shards[0][0].wait()
    place = ClientOptions(address=shards[0][1])
    began = time.perf_counter()
    shards[0] = start(folder / "0", "shard.json", "shard", "--listen", shards[0][1])
    while not asyncio.run(fetch_status(place)).get("versions"):
        assert time.perf_counter() - began < WAIT_S
        time.sleep(0.1)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=400.0, help="millions")
    parser.add_argument("--shards", default="0,1,2,4,8")
    parser.add_argument("--learners", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--overlap", type=int, default=12, help="enough rounds at a time for every shard")
    parser.add_argument("--durability", default="none")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--puppet", default="", help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    tensors = tensors_of(arguments.parameters)
    if arguments.puppet:
        print(json.dumps(asyncio.run(drive(arguments.puppet, arguments.address, tensors, arguments.seconds))))
        return
    print(f"{arguments.parameters:g}M parameters, {arguments.learners} learners, durability {arguments.durability}")
    print(f"{'shards':>6} {'rounds/s':>9} {'GB/s':>7} {'over S=1':>9} {'restart s':>10} {'shard GB':>9} {'disk GB':>8}")
    one = 0.0
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        for count in (int(text) for text in arguments.shards.split(",")):
            runs = [run(count, Path(name) / f"{count}-{n}", arguments) for n in range(arguments.repeat)]
            middle = {key: statistics.median(one[key] for one in runs) for key in runs[0]}
            one = middle["bytes_per_s"] if count == 1 else one
            over = middle["bytes_per_s"] / one if one else 0.0
            print(
                f"{count:6} {middle['rounds_per_s']:9.2f} {middle['bytes_per_s'] / 1e9:7.3f} {over:9.2f} "
                f"{middle.get('restart_s', 0.0):10.1f} {middle['shard_gb']:9.2f} {middle['disk_gb']:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
