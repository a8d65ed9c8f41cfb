"""Run one syncer process: listen, write its address where a launcher finds it, keep statistics, stop cleanly."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from pathlib import Path

from safetensors import SafetensorError

from atoll import kernels
from atoll.core import effects as fx
from atoll.errors import LaunchError
from atoll.observe import EventWriter, NullWriter, Writer, events
from atoll.syncer import SyncerOptions
from atoll.syncer.shell import SyncerShell
from atoll.wire import RunningServer, ServerOptions, serve

STATS_EVERY_S = 1.0
STOP_WAIT_S = 20.0
"""After SIGTERM, learners have this long to hand over what they have; it is above a learner's own flush bound."""


def run(options: SyncerOptions) -> int:
    return asyncio.run(_serve(options))


async def _serve(options: SyncerOptions) -> int:
    kernels.warm_up()  # before anybody can join: compiling would starve the loop, and learners find the cache filled
    run_id = secrets.token_hex(8)
    writer = _writer(options.run_folder)
    shell = SyncerShell(options.config, run_id, writer)
    server = await serve(
        shell,
        ServerOptions(
            listen=options.listen,
            token=options.token,
            tls_certificate=options.tls_certificate or "",
            tls_key=options.tls_key or "",
        ),
    )
    shell.end_session = server.close_session
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    writer.emit(events.SyncerStarted(run_id, server.address, os.getpid()))
    _announce(options.run_folder, server.address, run_id)
    print(f"atoll syncer {run_id} listens on {server.address}", flush=True)
    code = await _live(shell, server, writer, stop)
    shell.apply(fx.StopRequested("the syncer was stopped"))
    await _wait(shell.finished, STOP_WAIT_S if shell.machine.membership.connected() else 0.0)
    await shell.close()
    code = code or _save(shell, options.run_folder, writer)
    writer.emit(_stats(shell, server))
    writer.emit(events.SyncerStopped(shell.machine.stopping, shell.machine.book.commits))
    await server.stop()
    writer.close()
    return code


async def _live(shell: SyncerShell, server: RunningServer, writer: Writer, stop: asyncio.Event) -> int:
    """Until a signal comes or a merge fails, tell once a second how things are."""
    while not stop.is_set():
        await _wait(stop, STATS_EVERY_S)
        writer.emit(_stats(shell, server))
        if shell.failure is not None:
            print(f"atoll syncer: stopped by an error: {shell.failure!r}", file=sys.stderr, flush=True)
            return 1
    return 0


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass


def _stats(shell: SyncerShell, server: RunningServer) -> events.SyncerStats:
    return events.SyncerStats(
        **shell.machine.stats(),
        bytes_up=server.bytes_up + shell.inline_up,
        bytes_down=server.bytes_down + shell.inline_down,
    )


def _save(shell: SyncerShell, folder: Path | None, writer: Writer) -> int:
    """Write the published model; returns the exit status. A full disk must not cost the final statistics as well."""
    if folder is None or shell.state is None or shell.failure is not None:
        return 0
    try:
        shell.state.save(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        text = f"could not write the model to {folder}: {error}; make room there and run again"
        writer.emit(events.Warned("syncer", text))
        print(f"atoll syncer: {text}", file=sys.stderr, flush=True)
        return 1
    return 0


def _writer(folder: Path | None) -> Writer:
    if folder is None:
        return NullWriter()
    try:
        (folder / "events").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot write to run folder {folder}: {error.strerror}; choose another") from error
    return EventWriter(folder / "events" / f"syncer-{os.getpid()}.jsonl")


def _announce(folder: Path | None, address: str, run_id: str) -> None:
    """Write syncer.json in one piece: launchers poll for it."""
    if folder is None:
        return
    temporary = folder / "syncer.json.tmp"
    temporary.write_text(json.dumps({"address": address, "pid": os.getpid(), "run": run_id}) + "\n")
    temporary.replace(folder / "syncer.json")
