"""Run one shard process: listen, write its address where a launcher finds it, stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

from atoll import kernels
from atoll.errors import AtollError, ConfigError, FencedSyncerError, LaunchError
from atoll.keys import KeyFile
from atoll.metrics import ShardMetrics, metered_as
from atoll.observe import EventWriter, NullWriter, Writer
from atoll.private import private_umask
from atoll.syncer.options import EXIT_FENCED, ShardOptions
from atoll.syncer.shard import ShardService
from atoll.syncer.shard_arrays import ShardArrays
from atoll.syncer.shard_joins import RunToJoin
from atoll.wire import RunningServer, ServerOptions, attach_handler, check_options, check_ports, serve

LOOK_S = 1.0
"""How often a shard looks whether another one has taken its folder over."""
ORPHAN_S = 60.0
"""How long a shard without its launcher waits for its syncer to end: that one has learners to hear, and a model to
write."""
ORPHAN_LOOK_S = 0.2
ADDRESS_FILE = "shard.json"
EARLIER_PORT_TRIES = 20
EARLIER_PORT_PAUSE_S = 0.25
"""As for the syncer: a killed predecessor's port is free at once, a closing one's within seconds."""


def run(options: ShardOptions) -> int:
    kernels.warm_up()
    try:
        with private_umask():
            return asyncio.run(_serve(options))
    except FencedSyncerError as error:
        return _overtaken(str(error))


def _overtaken(why: str) -> int:
    print(f"atoll shard: {why}", file=sys.stderr, flush=True)
    return EXIT_FENCED


async def _serve(options: ShardOptions) -> int:
    wanted = _server_options(options)
    check_options(wanted)
    check_ports(options.listen, options.bulk_port)  # before the folder is taken over from a shard that serves
    counted = ShardMetrics()
    writer = metered_as(
        counted,
        _writer(options.run_folder),
        options.metrics,
        role="shard",
        name=options.listen,
        folder=options.run_folder,
        told_in=options.metrics_folder,
    )
    stop, fenced, waiting = asyncio.Event(), list[str](), list[asyncio.Task[None]]()
    orphaned = asyncio.Event()

    def overtaken(why: str) -> None:
        fenced.append(why)
        stop.set()

    arrays = ShardArrays(options.run_folder, writer, take_over=options.take_over)
    shard = ShardService(arrays, overtaken)
    server = await _listen(shard, options, wanted)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(
        signal.SIGHUP, lambda: waiting.append(loop.create_task(_end_after_syncer(shard, stop, orphaned)))
    )
    print(f"atoll shard {arrays.row['name']} listens on {server.address}", flush=True)
    joined = _run_to_join(options, server.address)
    coming = loop.create_task(joined.come()) if joined is not None else None
    if coming is not None:
        await asyncio.wait({coming, wait := loop.create_task(stop.wait())}, return_when=asyncio.FIRST_COMPLETED)
        wait.cancel()
        if not coming.cancel():
            coming.result()
    announce(options.run_folder, ADDRESS_FILE, server.address, arrays.row["name"])
    while not stop.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
        try:
            await arrays.look_around()
        except FencedSyncerError as error:
            overtaken(str(error))
        _end_revoked(wanted, shard, server)
        counted.told(shard.status(), server.bytes_up, server.bytes_down)
    if joined is not None and shard.led and not fenced and not orphaned.is_set():
        await joined.go()
    await server.stop()
    await asyncio.to_thread(arrays.close)
    writer.close()
    return _overtaken(fenced[0]) if fenced else 0


def _end_revoked(wanted: ServerOptions, shard: ShardService, server: RunningServer) -> None:
    """Whoever's key has ended in this shard's copy of the registry is out here, too."""
    if not isinstance(wanted.keys, KeyFile):
        return
    try:
        ended = wanted.keys.look()
    except ConfigError as error:
        print(f"atoll shard: {error}; the keys that were read before still hold", flush=True)
        return
    for name, detail in ended.items():
        shard.forget_sender(name)
        server.revoke(name, detail)


def _run_to_join(options: ShardOptions, address: str) -> RunToJoin | None:
    if options.join is None:
        return None

    def say(text: str) -> None:
        print(f"atoll shard: {text}", flush=True)

    return RunToJoin(options.join, options.address or address, say)


async def _end_after_syncer(shard: ShardService, stop: asyncio.Event, orphaned: asyncio.Event) -> None:
    """The launcher is gone, and the syncer is about to end: it wants the model first."""
    orphaned.set()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ORPHAN_S):
            while shard.led:
                await asyncio.sleep(ORPHAN_LOOK_S)
    stop.set()


def _writer(folder: Path | None) -> Writer:
    if folder is None:
        return NullWriter()
    try:
        (folder / "events").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot write to {folder}: {error.strerror}; choose another --run-folder") from error
    return EventWriter(folder / "events" / f"shard-{os.getpid()}.jsonl")


def _server_options(options: ShardOptions) -> ServerOptions:
    return ServerOptions(
        listen=options.listen,
        bulk_port=options.bulk_port,
        token=options.token,
        link_token=options.link_token,
        keys=KeyFile(options.keys) if options.keys is not None else None,
        tls_certificate=options.tls_certificate or "",
        tls_key=options.tls_key or "",
    )


async def _listen(shard: ShardService, options: ShardOptions, wanted: ServerOptions) -> RunningServer:
    """Listen where this shard listened before, if the port may be chosen: syncer and learners look for it there."""
    attach = attach_handler(shard.answering, relays=True)
    earlier = _earlier_address(options)
    for _ in range(EARLIER_PORT_TRIES if earlier else 0):
        try:
            return await serve(shard, replace(wanted, listen=earlier), attach=attach)
        except (OSError, RuntimeError, AtollError):
            await asyncio.sleep(EARLIER_PORT_PAUSE_S)
    return await serve(shard, wanted, attach=attach)


def _earlier_address(options: ShardOptions) -> str:
    host, _, port = options.listen.rpartition(":")
    if port != "0" or options.run_folder is None:
        return ""
    try:
        address = str(json.loads((options.run_folder / ADDRESS_FILE).read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return address if address.rpartition(":")[0] == host else ""


def announce(folder: Path | None, file: str, address: str, name: str) -> None:
    """Write shard.json or relay.json in one piece: launchers poll for it."""
    if folder is not None:
        told = {"address": address, "pid": os.getpid(), "name": name, "host": socket.gethostname()}
        temporary = folder / f"{file}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(told) + "\n")
        temporary.replace(folder / file)
