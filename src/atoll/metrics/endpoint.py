"""The endpoint of one process: its writer with the counting in front, and an HTTP server that tells the counts.

Nothing here may hold up training or a merge: counting is a few dictionary entries, answering happens on a thread, and
whatever goes wrong (a port that is taken, a library that is missing) is a warning in the events.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from atoll.metrics.families import Families
from atoll.metrics.http import serve_metrics
from atoll.metrics.of_learner import LearnerMetrics
from atoll.metrics.of_parts import RelayMetrics, ShardMetrics
from atoll.metrics.of_syncer import SyncerMetrics
from atoll.observe import Event, Warned, Writer
from atoll.private import make_private_folder
from atoll.wire import build_version


class CountedEvents(Protocol):
    families: Families

    def take(self, event: Event) -> None: ...


def metered(writer: Writer, listen: str, *, role: str, name: str, folder: Path | None) -> Writer:
    """The same writer, counted and told at `listen` (HOST:PORT; port 0: any). Empty: the writer as it is."""
    if not listen:
        return writer
    return metered_as(COUNTED[role](), writer, listen, role=role, name=name, folder=folder)


def metered_as(
    counted: CountedEvents,
    writer: Writer,
    listen: str,
    *,
    role: str,
    name: str,
    folder: Path | None,
    told_in: Path | None = None,
) -> Writer:
    """The same with counts of the caller's own, which it may fill in by itself. The file for Prometheus is written
    into `told_in`; None: into the folder's metrics."""
    if not listen:
        return writer
    return MeteredWriter(writer, counted, listen, role=role, name=name, folder=folder, told_in=told_in)


COUNTED: dict[str, Callable[[], CountedEvents]] = {
    "syncer": SyncerMetrics,
    "learner": LearnerMetrics,
    "shard": ShardMetrics,
    "relay": RelayMetrics,
}


class MeteredWriter:
    """Implements `atoll.observe.Writer`."""

    def __init__(
        self,
        writer: Writer,
        counted: CountedEvents,
        listen: str,
        *,
        role: str,
        name: str,
        folder: Path | None,
        told_in: Path | None = None,
    ) -> None:
        self.address = ""
        """Where it answers; empty if it could not be started."""
        self._writer = writer
        self._counted = counted
        self._folder = folder
        self._told_in = told_in or (folder / "metrics" if folder is not None else None)
        self._server: Any = None
        self._target_file: Path | None = None
        self._process(role)
        try:
            self._start(listen)
            self._announce(role, name)
        except ModuleNotFoundError:
            self.emit(Warned(name, "metrics need prometheus_client; install it: pip install 'atoll[metrics]'"))
        except (OSError, ValueError, OverflowError) as error:
            text = f"no metrics at {listen} ({error}); give another ATOLL_METRICS (--metrics), or port 0 for any"
            self.emit(Warned(name, text))

    def emit(self, event: Event) -> None:
        self._writer.emit(event)
        self._counted.take(event)

    def flush(self, timeout_s: float = 2.0) -> bool:
        return self._writer.flush(timeout_s)

    def close(self, timeout_s: float = 2.0) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if self._target_file is not None:
            self._target_file.unlink(missing_ok=True)
        self._writer.close(timeout_s)

    def _process(self, role: str) -> None:
        """What is true of any process."""
        families = self._counted.families
        families.gauge("atoll_build_info", "1; the version and the role are labels.", "version", "role")
        families.set("atoll_build_info", 1.0, build_version(), role)
        families.gauge("atoll_disk_free_bytes", "Free on the disk of the run folder.")
        families.gauge("atoll_disk_size_bytes", "Size of that disk.")

    def collect(self) -> Iterator[Any]:
        """Called when somebody asks."""
        if self._folder is not None:
            with contextlib.suppress(OSError):
                usage = shutil.disk_usage(self._folder)
                self._counted.families.set("atoll_disk_free_bytes", usage.free)
                self._counted.families.set("atoll_disk_size_bytes", usage.total)
        yield from self._counted.families.collect()

    def _start(self, listen: str) -> None:
        from prometheus_client import (
            CollectorRegistry,
            GCCollector,
            PlatformCollector,
            ProcessCollector,
        )

        host, _, port = listen.rpartition(":")
        registry = CollectorRegistry(auto_describe=False)
        for collector in (GCCollector, PlatformCollector, ProcessCollector):
            collector(registry=registry)
        registry.register(self)
        self._server = serve_metrics(host.strip("[]") or "127.0.0.1", int(port), registry)
        self.address = f"{host or '127.0.0.1'}:{self._server.server_port}"

    def _announce(self, role: str, name: str) -> None:
        """RUN/metrics/*.json are for Prometheus's file_sd_configs: it finds every process of the run by itself."""
        folder = self._told_in
        if folder is None:
            return
        make_private_folder(folder)
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:100]
        path = folder / f"{role}-{safe}-{os.getpid()}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps([{"targets": [self.address], "labels": {"role": role}}]) + "\n")
        partial.replace(path)
        self._target_file = path
