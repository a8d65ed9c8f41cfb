"""What `atoll doctor` looks at: each check says in one sentence what it found, and what to do about it.

Nothing here changes anything, and every check has a bound. Whoever wants to know why a learner does not join, or why a
run is slow, reads the whole list.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from atoll.errors import AtollError
from atoll.launch.builds import compare_builds
from atoll.observe import bits_text
from atoll.wire import ClientOptions, LinkSpeed, certificate_until, fetch_status, find_cause, probe_link

FILES_MIN = 4096
"""A syncer has two connections for each learner; Debian's default of 1024 is enough for 400."""
DISK_PROBE_BYTES = 32 << 20
DISK_PROBE_S_MAX = 5.0
DISK_SLOW_BYTES_S = 50e6
"""Below this a commit of a 100M-parameter run (1.2 GB) takes longer than most rounds."""
DISK_FREE_BYTES_MIN = 2 << 30
CLOCK_S_MAX = 5.0
"""Times are only labels, and certificates have dates: seconds do not matter, minutes do."""
LINK_THIN_BYTES_S = 125e3
"""1 Mbit/s: int4 contributions of a 10M-parameter model every minute or so."""
TOOL_S_MAX = 10.0
CERTIFICATE_S_MIN = 14 * 86400
"""Time to make a new one."""
SHARDS_ASKED_MAX = 32
GOOD, WARN, BAD = "good", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found. `remedy` is empty where all is well."""

    check: str
    level: str
    text: str
    remedy: str = ""


def check_machine(folder: Path) -> Iterator[Finding]:
    """This machine, and the disk of `folder`."""
    yield _descriptors()
    yield from _disk(folder)
    yield _gpus()
    yield _numa()
    yield _clock_is_kept()


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"this process may open {soft:,} files (at most {hard:,})"
    if soft >= FILES_MIN:
        return Finding("descriptors", GOOD, text)
    return Finding("descriptors", WARN, text, f"for more than some hundred learners: ulimit -n {min(hard, 65536)}")


def _disk(folder: Path) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(folder).free
        text = f"{free / 1e9:.1f} GB are free for {folder}"
        low = free < DISK_FREE_BYTES_MIN
        yield Finding("disk space", WARN if low else GOOD, text, "make room, or give another folder" if low else "")
        speed = disk_speed(folder)
        slow = speed < DISK_SLOW_BYTES_S
        remedy = "put the run folder on a local disk, or use --durability interval" if slow else ""
        yield Finding("disk speed", WARN if slow else GOOD, f"{speed / 1e6:.0f} MB/s, written and synced", remedy)
    except OSError as error:
        remedy = "give a folder that you may write to"
        yield Finding("disk", BAD, f"{folder} cannot be written ({error.strerror})", remedy)


def disk_speed(folder: Path) -> float:
    """Bytes per second that reach the disk: at most DISK_PROBE_BYTES are written, or for DISK_PROBE_S_MAX."""
    block, began_s, written = os.urandom(1 << 20), time.monotonic(), 0
    with tempfile.TemporaryFile(dir=folder, prefix=".atoll-doctor-") as file:
        while written < DISK_PROBE_BYTES and time.monotonic() - began_s < DISK_PROBE_S_MAX:
            written += file.write(block)
            file.flush()
            os.fsync(file.fileno())
    return written / max(1e-9, time.monotonic() - began_s)


def _gpus() -> Finding:
    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) if Path("/proc/driver/nvidia/gpus").exists() else 0
    told = _said("nvidia-smi", "-L")
    listed = told.count("GPU ") if told else 0
    if not there and not listed:
        return Finding("GPUs", GOOD, "none that this machine's driver knows; training uses the CPU")
    seen = _said(sys.executable, "-c", "import torch; print(torch.cuda.device_count())")
    if seen.strip().isdigit() and int(seen) == 0:
        remedy = "look at CUDA_VISIBLE_DEVICES, and install a PyTorch that was built for this driver"
        return Finding("GPUs", BAD, f"the driver has {max(there, listed)}, and PyTorch sees none", remedy)
    return Finding(
        "GPUs", GOOD, f"the driver has {max(there, listed)}, PyTorch sees {seen.strip() or 'an unknown number'}"
    )


def _numa() -> Finding:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    cores = len(os.sched_getaffinity(0))
    if len(nodes) < 2:
        return Finding("NUMA", GOOD, f"one memory node, {cores} cores for this process")
    text = f"{len(nodes)} memory nodes, {cores} of {os.cpu_count()} cores for this process"
    remedy = "bind each learner to the node of its GPU: numactl --cpunodebind=N --membind=N"
    return Finding("NUMA", WARN if cores == os.cpu_count() else GOOD, text, remedy if cores == os.cpu_count() else "")


def _clock_is_kept() -> Finding:
    told = _said("timedatectl", "show", "-p", "NTPSynchronized", "--value") or _said("chronyc", "-c", "tracking")
    if told.strip() == "no":
        return Finding("clock", WARN, "nobody keeps this machine's clock", "install chrony, or systemd-timesyncd")
    return Finding("clock", GOOD, "kept by a time server" if told else "no time service was found that says otherwise")


def _said(*argv: str) -> str:
    """What a tool prints; empty if it is not there, fails, or takes too long."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=TOOL_S_MAX)
        return done.stdout if done.returncode == 0 else ""
    return ""


# ---------------------------------------------------------------- the syncer


def check_syncer(
    options: ClientOptions,
    ask: Callable[[ClientOptions], dict[str, Any]] = lambda options: asyncio.run(fetch_status(options)),
    probe: Callable[[ClientOptions], LinkSpeed] = lambda options: asyncio.run(probe_link(options)),
) -> Iterator[Finding]:
    """The way to a syncer, and how its run is."""
    cause = find_cause(options)
    if cause is not None:
        text, _, remedy = cause.text.rpartition("; ")
        yield Finding("syncer", BAD, text or cause.text, remedy if text else "")
        return
    tls = "with TLS" if options.tls_ca else "without TLS"
    yield Finding("port", GOOD, f"{options.address} takes connections, {tls}")
    yield from _certificate(options)
    offset_s = None
    try:
        began_s, wall_s = time.monotonic(), time.time()
        answer = ask(options)
        if "time_s" in answer:
            offset_s = float(answer["time_s"]) - wall_s - (time.monotonic() - began_s) / 2
        link = probe(options)
    except AtollError as error:
        text, _, remedy = str(error).rpartition("; ")
        yield Finding("status", BAD, text or str(error), remedy if text else "give the run's token (--token-file)")
        return
    down = f"{bits_text(link.down_bytes_s)} down" if link.down_bytes_s else "down not told: the syncer is older"
    text = f"round trip {1000 * link.round_trip_s:.1f} ms, at least {bits_text(link.up_bytes_s)} up, {down}"
    slow = 0 < min(link.up_bytes_s, link.down_bytes_s or link.up_bytes_s) < LINK_THIN_BYTES_S
    yield Finding("link", WARN if slow else GOOD, text, "`atoll plan` says what a run needs of it" if slow else "")
    if offset_s is not None:
        off = abs(offset_s) > CLOCK_S_MAX
        text = f"the syncer's clock is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this one"
        remedy = "set both clocks by a time server: certificates have dates" if off else ""
        yield Finding("clocks", WARN if off else GOOD, text, remedy)
    text, fits = compare_builds(answer)
    here = f"this is {version('atoll')}, the syncer {text.partition(': they cannot')[0]}"
    yield Finding("build", GOOD if fits else BAD, here, "" if fits else "upgrade the older side by one release first")
    yield from _shards(answer, options, ask)
    yield from _run(answer)


def _certificate(options: ClientOptions) -> Iterator[Finding]:
    until_s = certificate_until(options) if options.tls_ca else None
    if until_s is not None:
        soon = until_s - time.time() < CERTIFICATE_S_MIN
        text = f"the syncer's is valid until {time.strftime('%Y-%m-%d', time.gmtime(until_s))}"
        remedy = "make a new one before that (`atoll keys`), and start the syncer again with it" if soon else ""
        yield Finding("certificate", WARN if soon else GOOD, text, remedy)


def _shards(
    answer: dict[str, Any], options: ClientOptions, ask: Callable[[ClientOptions], dict[str, Any]]
) -> Iterator[Finding]:
    """Learners push to shards: those must be reached from here, too."""
    for shard in list(answer.get("shards", ()))[:SHARDS_ASKED_MAX]:
        name, place = f"shard {shard.get('name')}", str(shard.get("address"))
        if shard.get("away"):
            yield Finding(name, BAD, f"the syncer has lost it ({place})", "start it again: its fragments stand still")
            continue
        try:
            told = ask(replace(options, address=place))
            yield Finding(name, GOOD, f"{place} answers, with {len(told.get('versions', ()))} fragments")
        except AtollError as error:
            text, _, remedy = str(error).rpartition("; ")
            yield Finding(name, BAD, text or str(error), remedy if text else "open its port for this machine")


def _run(answer: dict[str, Any]) -> Iterator[Finding]:
    members = list(answer.get("members", ()))
    here = [one for one in members if one.get("state") == "active"]
    expected = int(answer.get("expected", 0))
    few = len(here) < expected
    text = f"{len(here)} of {expected} learners train; {answer.get('commits', 0):,} commits"
    yield Finding("learners", WARN if few else GOOD, text, "`atoll status` says who is missing" if few else "")
    protocols = {str(one.get("protocol")) for one in here}
    if len(protocols) > 1:
        text = f"learners speak protocols {', '.join(sorted(protocols))}"
        yield Finding("versions", WARN, text, "they work together; upgrade the older ones when you can")
    for one in here:
        up, down = float(one.get("up_bytes_s", 0)), float(one.get("down_bytes_s", 0))
        for thin in one.get("thin", ()):
            remedy = "a smaller --codec-up, more --sync-every, or a wider link"
            yield Finding(f"link of {one.get('learner')}", WARN, f"too thin: {thin}", remedy)
        if up or down:
            moved = f"{up / 1e3:.0f} kB/s up and {down / 1e3:.0f} kB/s down, as the run uses it"
            yield Finding(f"link of {one.get('learner')}", GOOD, moved)
    if answer.get("degraded"):
        yield Finding(
            "durability", BAD, f"commits are not on disk: {answer['degraded']}", "make room there, or mend it"
        )
    for warning in list(answer.get("warnings", ()))[-3:]:
        yield Finding("warning", WARN, str(warning.get("text", "")))
