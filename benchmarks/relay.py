"""What a relay spares the link of its site: bytes per round that cross it, both ways, with and without one.

    python benchmarks/relay.py                       # 2 sites of 3 learners, 24M parameters, 48 rounds each
    python benchmarks/relay.py --learners 6 --parameters 4

In the last case two shards merge. Relays reach them past the proxy of their site, through one of each shard's own; what
the coordinator says to a shard goes through that, too, and is in the figures.

As in rounds.py, learners compute nothing: they answer every request with a ready-made int4 contribution and fetch every
update. Every site reaches the syncer through a TCP proxy that counts; so everything on the link is in the figures,
reports and TLS-less gRPC included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import rounds
from rounds import FRAGMENTS, Puppet
from shards import start, tensors_of

from atoll.errors import AtollError
from atoll.instruments.chaos import ChaosProxy
from atoll.wire import ClientOptions, fetch_status, split_address

SITES = ("a", "b")
CASES = {"no relay": None, "relay --no-merge": ("--no-merge",), "relay": (), "relay, 2 shards": ()}
SHARDS = 2
STEP_S = 0.05
"""Between two reports of a learner: with more of them than a training run has, reports would be what is measured."""
WARM_COMMITS = FRAGMENTS
WAIT_S = 300.0


def start_relay(upstream: str, options: tuple[str, ...]) -> tuple[subprocess.Popen[bytes], str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    argv = [sys.executable, "-m", "atoll", "relay", "--upstream", upstream, "--listen", address, *options]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            asyncio.run(fetch_status(ClientOptions(address=address)))
            return process, address
        except AtollError:
            assert process.poll() is None and time.monotonic() < deadline, "the relay did not start"
            time.sleep(0.05)


async def drive(
    places: dict[str, str], proxies: list[tuple[str, ChaosProxy]], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Bytes up and down per round and site, once everybody has joined."""
    tensors = tensors_of(arguments.parameters)
    names = [(site, f"{site}{number}") for site in SITES for number in range(arguments.learners)]
    puppets = [Puppet(name, places[site], tensors) for site, name in names]
    tasks = [asyncio.create_task(puppet.run()) for puppet in puppets]

    async def until(commits: int) -> list[int]:
        deadline = time.monotonic() + WAIT_S
        while min(puppet.commits for puppet in puppets) < commits:
            for task in tasks:
                if task.done():
                    task.result()
            assert time.monotonic() < deadline, [puppet.commits for puppet in puppets]
            await asyncio.sleep(0.02)
        told = [proxy.stats(name) for name, proxy in proxies]
        return [puppets[0].commits, sum(one.bytes_up for one in told), sum(one.bytes_down for one in told)]

    before = await until(WARM_COMMITS)
    after = await until(before[0] + arguments.rounds)
    for task in tasks:
        task.cancel()
    count, up, down = (now - then for now, then in zip(after, before, strict=True))
    return up / count / len(SITES), down / count / len(SITES)


def start_shards(
    folder: Path, stack: contextlib.ExitStack
) -> tuple[list[subprocess.Popen[bytes]], list[str], list[tuple[str, ChaosProxy]]]:
    """Each behind a proxy of its own; where they are found."""
    processes, places, proxies = [], [], []
    for number in range(SHARDS):
        own = folder / f"shard-{number}"
        own.mkdir()
        shard, address = start(own, "shard.json", "shard", "--listen", "127.0.0.1:0")
        proxy = stack.enter_context(ChaosProxy())
        proxy.start(lambda address=address: split_address(address))  # type: ignore[misc]
        host, port = proxy.add("shard")
        processes.append(shard)
        places.append(f"{host}:{port}")
        proxies.append(("shard", proxy))
    return processes, places, proxies


def run(
    options: tuple[str, ...] | None, folder: Path, arguments: argparse.Namespace, *, sharded: bool
) -> tuple[float, float]:
    sync = ["--fragments", str(FRAGMENTS), "--quorum", "all", "--sync-every", "24", "--overlap", "2"]
    sync += ["--learners", str(len(SITES) * arguments.learners), "--durability", "none", "--new-run"]
    with contextlib.ExitStack() as stack:
        processes, shards, proxies = start_shards(folder, stack) if sharded else ([], [], [])
        more = ["--shards", ",".join(shards)] if shards else []
        syncer, address = start(folder, "syncer.json", "syncer", "--listen", "127.0.0.1:0", *sync, *more)
        processes.insert(0, syncer)
        places: dict[str, str] = {}
        proxy = stack.enter_context(ChaosProxy())
        proxy.start(lambda: split_address(address))
        for site in SITES:
            host, port = proxy.add(site)
            places[site] = f"{host}:{port}"
            if options is not None:
                relay, places[site] = start_relay(places[site], options)
                processes.append(relay)
        try:
            return asyncio.run(drive(places, [*proxies, *((site, proxy) for site in SITES)], arguments))
        finally:
            for process in processes:
                process.kill()
                process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=24.0, help="millions")
    parser.add_argument("--learners", type=int, default=3, help="of each site")
    parser.add_argument("--rounds", type=int, default=48)
    arguments = parser.parse_args()
    rounds.STEP_S = STEP_S
    print(f"{len(SITES)} sites of {arguments.learners} learners, {arguments.parameters:g}M parameters, int4 both ways")
    print(f"{'':18} {'up kB':>9} {'down kB':>9} {'up':>6} {'down':>6}   of one site's link, per round", flush=True)
    first: tuple[float, float] | None = None
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            up, down = run(options, Path(folder), arguments, sharded="shards" in name)
        first = first or (up, down)
        print(f"{name:18} {up / 1e3:9.1f} {down / 1e3:9.1f} {first[0] / up:5.2f}x {first[1] / down:5.2f}x", flush=True)


if __name__ == "__main__":
    main()
