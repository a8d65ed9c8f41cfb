"""Run one syncer process: listen, write its address where a launcher finds it, keep statistics, stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from atoll import kernels
from atoll.core import SETTINGS_KEY, SYNCER_STOPPED, Recovery
from atoll.core import effects as fx
from atoll.errors import AtollError, ConfigError, FencedSyncerError, LaunchError
from atoll.keys import KeyFile
from atoll.metrics import metered
from atoll.observe import EventWriter, NullWriter, Writer, bound_logs, events
from atoll.private import private_umask
from atoll.store import TAPE_FILES_ALL, TAPE_FILES_KEPT, Hold, RunStore, SnapshotTarget, open_store
from atoll.syncer.alone import begun, over
from atoll.syncer.begin import claim_location, epoch_of, find, how_to_begin, let_go, tell
from atoll.syncer.claim import ClaimKeeper
from atoll.syncer.ending import Ending, ModelFile
from atoll.syncer.key_watch import watch_keys
from atoll.syncer.news import News
from atoll.syncer.options import EXIT_FENCED, SyncerOptions
from atoll.syncer.recover import agree_on_settings
from atoll.syncer.replica import check_replica, forget_unbegun, mark_led, refused_primary, wait_as_replica
from atoll.syncer.replicate import Replicator
from atoll.syncer.shard_recover import PATIENCE_AGAIN_S, PATIENCE_S, find_rows, lead_shards, with_shards
from atoll.syncer.sharded import ShardedShell
from atoll.syncer.shell import SyncerShell
from atoll.syncer.snapshotter import ONLY_WHEN_ASKED, Snapshotter
from atoll.syncer.standby import check_standby, wait_for_turn
from atoll.syncer.state_writer import StateWriter
from atoll.syncer.teller import Teller, names
from atoll.wire import ClientOptions, RunningServer, ServerOptions, attach_handler, check_options, check_ports, serve

BEGINS_ANEW = -1
"""Of a coordinator that goes on from what is on disk, at once and in this process: a shard that was away is back."""
STATS_EVERY_S = 1.0
LOGS_EVERY_S = 60.0
EARLIER_PORT_TRIES = 20
EARLIER_PORT_PAUSE_S = 0.25
"""A killed predecessor's port is free at once; a frozen or closing one may need some seconds."""
STOP_WAIT_S = 20.0
"""After SIGTERM, learners have this long to hand over what they have; it is above a learner's own flush bound."""


def run(options: SyncerOptions) -> int:
    check_replica(options)
    if options.standby:
        if not options.replica:
            check_standby(options)
        check_options(_server_options(options))  # now, not when the other one is gone
    kernels.warm_up()  # before anybody can join: compiling would starve the loop, and learners find the cache filled
    try:
        if options.replica:
            standing_by = replace(_server_options(options), link_token=options.link_token)
            if not wait_as_replica(options, standing_by, tell):
                return 0
        elif options.standby and not wait_for_turn(options, _target(options), tell):
            return 0
        with private_umask():
            patience_s = PATIENCE_S
            while (code := asyncio.run(_serve(options, patience_s))) == BEGINS_ANEW:
                options, patience_s = replace(options, take_over=False, standby=False), PATIENCE_AGAIN_S
            return code
    except FencedSyncerError as error:  # while it was starting
        print(f"atoll syncer: {error}", file=sys.stderr, flush=True)
        return EXIT_FENCED


async def _serve(options: SyncerOptions, patience_s: float) -> int:
    wanted = _server_options(options)
    check_options(wanted)
    # All of it before another syncer is ended: who cannot serve takes nobody's place.
    check_ports(options.listen, options.bulk_port)
    target = _target(options)
    store = _open_store(options)
    hold = claim_location(options, target, store)
    try:
        return await _serve_claimed(options, wanted, store, target, hold, patience_s)
    except BaseException:
        let_go(hold)
        raise


async def _serve_claimed(
    options: SyncerOptions,
    wanted: ServerOptions,
    store: RunStore | None,
    target: SnapshotTarget | None,
    hold: Hold | None,
    patience_s: float,
) -> int:
    plain = _writer(options.run_folder)
    writer = News(metered(plain, options.metrics, role="syncer", name="syncer", folder=options.run_folder))
    say = _say if options.lines else _say_nothing
    mark_led(store)
    started_ns = time.monotonic_ns()
    found, problems = find_rows(store, target) if options.sharded else find(options, store, target)
    load_ns = time.monotonic_ns() - started_ns
    keeper = StateWriter(store, options.durability, options.durability_interval_s, writer, record=options.record)
    run_id = found[0].rows["run"]["run"] if found is not None else secrets.token_hex(8)
    begin = how_to_begin(options, found[0] if found is not None else None, problems, hold, writer)
    if found is None and store is not None:
        forget_unbegun(store)
    epoch = epoch_of(store, found[0] if found is not None else None, hold, take_over=options.take_over)
    continues = found is not None
    config, said = agree_on_settings(options.config, found[0].rows if found is not None else None)
    shell = (
        SyncerShell(config, run_id, writer, epoch=epoch, keeper=keeper, begin=begin) if not options.sharded else None
    )
    if shell is None:
        fleet = await lead_shards(options, found[0] if found is not None else None, epoch, patience_s)
        found = found and with_shards(found[0], fleet, options.durability)
        shell = ShardedShell(config, run_id, writer, epoch=epoch, keeper=keeper, begin=begin, fleet=fleet)
        shell.shards.changes.lost_after_s = options.shard_lost_after_s
        shell.writes_model = options.run_folder is not None and options.model
    teller = Teller(say, lambda learner: _peer(shell, learner))
    writer.tell = teller.hear
    if found is not None:
        handed, payloads, problems = keeper.load_handed()
        handed = [*found[0].handed, *handed]
        found = (replace(found[0], handed=handed, problems=[*found[0].problems, *problems]), found[1])
        shell.restore(found[0], found[1], payloads, load_ns)
        if found[0].unwritten or found[0].epoch:
            rows = {**found[0].rows, SETTINGS_KEY: shell.machine.config.to_dict()} if found[0].epoch else {}
            shell.take_in(rows, found[0].unwritten)
        _tell_recovery(shell, found[0], said, load_ns)
    del found
    if options.replicate:
        await _replicate(shell, options)
    keeper.check_epoch()  # loading takes a while: another syncer may have taken over and be listening
    server = await _listen(shell, options, wanted)
    shell.platform.close_link, shell.peer_of = server.close_session, server.peer_of
    shell.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    epoch = shell.machine.epoch
    for event in begun(options, config, continues=continues):
        writer.emit(event)
    writer.emit(events.SyncerStarted(run_id, server.address, os.getpid(), epoch, keeper.level))
    for text in server.warnings:
        writer.emit(events.Warned("syncer", text))
    watching = (
        asyncio.create_task(watch_keys(keys, shell, server)) if isinstance(keys := wanted.keys, KeyFile) else None
    )
    ending = Ending(
        shell,
        end_when_left=options.end_when_left,
        end_when_finished=options.end_when_finished,
        stay=options.stay,
    )
    model = ModelFile(shell, options.run_folder if options.model else None, writer, say)
    shell.more_status = lambda: {**model.status(), **_bytes(shell, server), "title": options.title}
    code = _overtaken(shell) or _take_the_word(shell, options, server)
    claim = ClaimKeeper(shell, hold, writer) if hold is not None else None
    snapshotter = None
    if not code:
        print(f"atoll syncer {run_id} (epoch {epoch}) listens on {server.address}{_certified(server)}", flush=True)
        place = target or _at_home(options)
        if place is not None:
            every_s = options.snapshot_every_s if target is not None else ONLY_WHEN_ASKED
            snapshotter = Snapshotter(shell, place, every_s, writer, claim)
            shell.snapshot_now = snapshotter.now
        logs = options.run_folder / "logs" if options.run_folder is not None else None
        code = await _live(shell, server, stop, ending, model, logs) or _overtaken(shell)
    if code == BEGINS_ANEW:
        await _let_go(shell, server, claim, snapshotter)
        writer.close()
        return code
    if code != EXIT_FENCED:
        why = ending.reason(time.monotonic_ns()) if not stop.is_set() else ""
        say(f"ends: {why}" if why else "ends, once learners have handed over what they have")
        shell.apply(fx.StopRequested(why or SYNCER_STOPPED))
        await _wait(shell.finished, STOP_WAIT_S if any(m.connected for m in shell.machine.members.values()) else 0.0)
    if watching is not None:
        watching.cancel()
    if keeper.replica is not None and keeper.replica.waits:
        keeper.gate.fence()  # it may have taken over: what waits for it is on this disk, and is said to nobody
        if snapshotter is not None:
            snapshotter.cancel()
    elif snapshotter is not None:
        await snapshotter.close()
    if claim is not None:
        await claim.close()
    if keeper.replica is not None:
        keeper.replica.end()
    await shell.close()
    if keeper.replica is not None:
        await keeper.replica.close(goodbye=code == 0 and not shell.fenced)
    teller.finish()
    failed = code or _overtaken(shell)
    code = failed or model.write()
    writer.emit(_stats(shell, server))
    _tell_data(shell, writer)
    steps = {member.learner: member.steps for member in shell.machine.members.values() if member.steps}
    commits = shell.machine.stats()["commits"]
    writer.emit(events.SyncerStopped(shell.fenced or shell.machine.stopping, commits, steps))
    for last in over(options, shell.machine.stopping, (time.monotonic_ns() - started_ns) / 1e9) if not failed else ():
        writer.emit(last)
    await server.stop()
    writer.close()
    if code == 0:
        with contextlib.suppress(OSError):
            _announce(options.run_folder, server, run_id, ended=True)
    return code


async def _replicate(shell: SyncerShell, options: SyncerOptions) -> None:
    """From here on nothing is said before the standby has it, too."""

    def tell_durability(level: str, reason: str) -> None:
        shell.news.emit(events.DurabilityChanged(level, options.durability, reason))

    place = ClientOptions(address=options.replicate, token=options.shard_token, tls_ca=options.shard_tls_ca)
    goes_on = options.replicate_or_go_on
    shell.keeper.replica = Replicator(place, options.standby_after_s, goes_on=goes_on, tell=tell_durability)
    await shell.keeper.replica.begin(shell)


def _open_store(options: SyncerOptions) -> RunStore | None:
    if options.run_folder is None or options.durability == "none":
        return None
    kept = TAPE_FILES_ALL if options.record else TAPE_FILES_KEPT
    take_over = options.take_over or options.standby
    return open_store(options.run_folder / "state", take_over=take_over, tape_files_kept=kept)


def _target(options: SyncerOptions) -> SnapshotTarget | None:
    if not options.snapshots:
        return None
    try:
        extra = json.loads(options.snapshot_options or "{}")
        if not isinstance(extra, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(f"--snapshot-options must be a JSON object of file system options ({error})") from None
    return SnapshotTarget(options.snapshots, keep=options.snapshots_keep, options=extra)


def _at_home(options: SyncerOptions) -> SnapshotTarget | None:
    """RUN/snapshots, for whoever asks for a snapshot of a run that makes none by itself."""
    if options.run_folder is None:
        return None
    return SnapshotTarget(str(options.run_folder / "snapshots"), keep=options.snapshots_keep)


def _server_options(options: SyncerOptions) -> ServerOptions:
    return ServerOptions(
        listen=options.listen,
        bulk_port=options.bulk_port,
        token=options.token,
        keys=KeyFile(options.keys) if options.keys is not None else None,
        tls_certificate=options.tls_certificate or "",
        tls_key=options.tls_key or "",
    )


async def _listen(shell: SyncerShell, options: SyncerOptions, wanted: ServerOptions) -> RunningServer:
    """Listen where this run listened before, if the port may be chosen: learners look for the syncer there."""
    relays = shell.platform.relays
    relays.refused = lambda method, values: refused_primary(shell.machine.run, shell.machine.epoch, method, values)
    attach = attach_handler(relays.answering)
    change = shell.shards.changes.asked if isinstance(shell, ShardedShell) else None
    earlier = _earlier_address(options)
    if earlier:
        for _ in range(EARLIER_PORT_TRIES):
            try:
                return await serve(shell, replace(wanted, listen=earlier), attach=attach, change_shards=change)
            except (OSError, RuntimeError, AtollError):
                await asyncio.sleep(EARLIER_PORT_PAUSE_S)
        print(f"atoll syncer: the earlier address {earlier} is taken; learners must be told the new one", flush=True)
    return await serve(shell, wanted, attach=attach, change_shards=change)


def _earlier_address(options: SyncerOptions) -> str:
    host, _, port = options.listen.rpartition(":")
    if port != "0" or options.run_folder is None:
        return ""
    try:
        address = str(json.loads((options.run_folder / "syncer.json").read_text())["address"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return address if address.rpartition(":")[0] == host else ""


def _tell_recovery(shell: SyncerShell, recovery: Recovery, said: Sequence[str], load_ns: int) -> None:
    versions = shell.machine.versions
    print(
        f"atoll syncer: continues run {shell.machine.run} from {recovery.source} at versions {min(versions)} to "
        f"{max(versions)} ({load_ns / 1e9:.2f} s)",
        flush=True,
    )
    for problem in (*said, *recovery.problems):
        print(f"atoll syncer: {problem}", flush=True)


async def _live(
    shell: SyncerShell, server: RunningServer, stop: asyncio.Event, ending: Ending, model: ModelFile, logs: Path | None
) -> int:
    """Until a signal comes, a merge fails or everything is done, tell once a second how things are. `logs` are what the
    processes of the run print, whoever started them: a run has one syncer, so that one keeps them short."""
    writer, waits, looked_s = shell.news, "", 0.0
    while not stop.is_set() and not ending.reason(time.monotonic_ns()):
        await _wait(stop, STATS_EVERY_S)
        if shell.machine.waits_unsaid != waits:
            waits = shell.machine.waits_unsaid
            print(f"atoll syncer: {waits or 'the run goes on'}", flush=True)
        writer.emit(_stats(shell, server))
        _tell_data(shell, writer)
        if shell.fenced:
            return _overtaken(shell)
        if isinstance(shell, ShardedShell) and shell.must_begin_anew():
            print(f"atoll syncer: {shell.shards.again}; goes on from what is on disk", flush=True)
            return BEGINS_ANEW
        if shell.failure is not None:
            print(f"atoll syncer: stopped by an error: {shell.failure!r}", file=sys.stderr, flush=True)
            return 1
        if ending.nobody_trains:
            await model.refresh()
        if logs is not None and time.monotonic() - looked_s > LOGS_EVERY_S:
            looked_s = time.monotonic()
            await asyncio.to_thread(bound_logs, logs)
    return 0


async def _let_go(
    shell: SyncerShell, server: RunningServer, claim: ClaimKeeper | None, snapshotter: Snapshotter | None
) -> None:
    """End as in a crash: nobody is told to stop, sessions break, and nothing is written but what was said before. Only
    what the next one needs is freed: the port, the claim, the disk."""
    await server.cut()
    if snapshotter is not None:
        snapshotter.cancel()
    if claim is not None:
        await claim.close()
    assert isinstance(shell, ShardedShell)
    await shell.shards.changes.close()
    await shell.fleet.close()
    await asyncio.to_thread(shell.keeper.close)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def _say_nothing(text: str) -> None:
    """The live view says it."""


def _peer(shell: SyncerShell, learner: str) -> str:
    member = shell.machine.members.get(learner)
    return shell.peer_of(member.session) if member is not None else ""


def _certified(server: RunningServer) -> str:
    certificate = server.certificate
    if certificate is None:
        return ""
    until = time.strftime("%Y-%m-%d", time.gmtime(certificate.until_s))
    return f" with TLS; its certificate is for {names(certificate.names)}, until {until}"


def _overtaken(shell: SyncerShell) -> int:
    """The exit status of a syncer whose place a newer one has taken, else 0. The disk is asked: this process may have
    been frozen until a moment ago."""
    try:
        if not shell.fenced:
            shell.keeper.check_epoch()
    except FencedSyncerError as error:
        shell.overtaken(error)
    except OSError as error:
        print(f"atoll syncer: cannot see whether a newer syncer has taken over ({error})", file=sys.stderr, flush=True)
    if not shell.fenced:
        return 0
    print(f"atoll syncer: {shell.fenced}", file=sys.stderr, flush=True)
    return EXIT_FENCED


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        pass


def _stats(shell: SyncerShell, server: RunningServer) -> events.SyncerStats:
    return events.SyncerStats(**shell.machine.stats(), **_bytes(shell, server))


def _bytes(shell: SyncerShell, server: RunningServer) -> dict[str, Any]:
    up = server.bytes_up + shell.inline_up + shell.platform.relays.peers.bytes_up
    return {"bytes_up": up, "bytes_down": server.bytes_down + shell.inline_down}


def _tell_data(shell: SyncerShell, writer: Writer) -> None:
    """The state of every data stream, when it has changed."""
    for stream, counts in shell.machine.data_status().items():
        if shell.told_data.get(stream) != counts:
            shell.told_data[stream] = counts
            writer.emit(events.DataLedger(stream, **counts, lost=shell.machine.data_lost(stream)))


def _writer(folder: Path | None) -> Writer:
    if folder is None:
        return NullWriter()
    try:
        (folder / "events").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"cannot write to run folder {folder}: {error.strerror}; choose another") from error
    return EventWriter(folder / "events" / f"syncer-{os.getpid()}.jsonl")


def _take_the_word(shell: SyncerShell, options: SyncerOptions, server: RunningServer) -> int:
    """Say where this syncer is, unless another one has overtaken it."""
    try:
        shell.keeper.while_newest(lambda: _announce(options.run_folder, server, shell.machine.run))
    except FencedSyncerError:
        return _overtaken(shell)
    return 0


def _announce(folder: Path | None, server: RunningServer, run_id: str, *, ended: bool = False) -> None:
    """Write syncer.json in one piece: launchers poll for it, and `atoll status` finds the syncer by it. A standby need
    not take the place of one that has `ended` in order."""
    if folder is None:
        return
    told: dict[str, object] = {"address": server.address, "pid": os.getpid(), "run": run_id, "ended": ended}
    told["host"] = socket.gethostname()
    if server.certificate is not None:
        told |= {"certificate": str(Path(server.certificate.path).resolve()), "names": server.certificate.names}
    temporary = folder / f"syncer-{os.getpid()}.json.tmp"
    temporary.write_text(json.dumps(told) + "\n")
    temporary.replace(folder / "syncer.json")
    (folder / "result.json").unlink(missing_ok=True)  # of an earlier syncer by hand: the run goes on
