"""How one syncer is run, and the call that runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.core import SyncConfig

if TYPE_CHECKING:
    from atoll.wire import ClientOptions

EXIT_FENCED = 3
"""Exit status of a syncer that a newer one has fenced out."""


@dataclass(frozen=True, slots=True)
class SyncerOptions:
    """How to run one syncer."""

    listen: str
    """host:port; port 0 takes the one that this run had before, or a free one. Anything but loopback needs a token and
    TLS."""
    config: SyncConfig | Mapping[str, Any]
    """The settings of the synchronisation, whole or by name: what is not named is the default in a new run, and in one
    that goes on what it was, whatever this version's defaults are."""
    run_folder: Path | None = None
    """Where events, state, `syncer.json` (the real address) and `model.safetensors` go; None keeps nothing."""
    token: str = field(default="", repr=False)
    keys: Path | None = None
    """Instead of one token: the registry of `atoll keys`, in which each learner has its own. It is read again whenever
    it changes."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    durability: str = "commit"
    """commit: every version is on disk (RUN/state) before anybody hears of it; interval: every so often; none."""
    durability_interval_s: float = 30.0
    """Seconds between two writes at level interval."""
    snapshots: str = ""
    """Where whole snapshots of the run go: a folder or any fsspec URL. Empty: none are made."""
    snapshot_every_s: float = 300.0
    snapshots_keep: int = 3
    snapshot_options: str = field(default="", repr=False)
    """A JSON object of options for the file system behind `snapshots`, such as {"endpoint_url": "..."}. It may hold
    credentials: it is neither kept nor shown."""
    record: bool = False
    """Record what every merge is made from (RUN/state/recording), so that `atoll replay` can make it again."""
    end_when_left: bool = False
    """End once everybody who was in the run has left, or has been lost for long."""
    end_when_finished: bool = False
    """The same, but who left because of a signal (a machine that was taken away) or was lost is waited for."""
    stay: bool = False
    """Serve until a signal comes, also when the budget is spent and everybody has left: a launcher ends it."""
    lines: bool = True
    """Say on standard output what happens; False where a live view does."""
    title: str = ""
    """What views call the run, where no launcher says it; empty: the name of the run folder."""
    metrics: str = ""
    """HOST:PORT where a Prometheus may ask; empty: nowhere."""
    take_over: bool = False
    """Start although another syncer holds the run folder or the snapshot location; that one is fenced out and ends."""
    new_run: bool = False
    """Begin a new run where no state is left, although learners or traces tell of an earlier one."""
    first_start: bool = False
    """A launcher has made the run folder a moment ago: nobody can hold this run, and nobody need be asked."""
    must_continue: bool = False
    """Refuse to start where there is nothing to continue."""
    standby: bool = False
    """Wait until the syncer that holds the run folder or the snapshot location is gone, and take its place."""
    standby_after_s: float = 15.0
    """How long a primary must be silent that may only be frozen or out of reach."""
    model: bool = True
    """Write RUN/model.safetensors when nobody trains and at the end: 4 bytes per parameter of memory and disk."""
    replica: bool = False
    """Be a standby that a primary with `replicate` sends everything to, and that shares nothing with it."""
    replicate: str = ""
    """host:port of such a standby: nothing is published before it is on its disk as well."""
    replicate_or_go_on: bool = False
    """Do not wait for a standby that is away for longer than `standby_after_s`, although it may have taken over."""
    shards: tuple[str, ...] = ()
    """host:port of each `atoll shard` that has fragments of this run; none: they are all here."""
    peers: bool = False
    """Shards come by themselves (`ShardOptions.join`), beside those that are named, if any."""
    shard_lost_after_s: float = 0.0
    """A shard that is away for longer is given up: others get its fragments, and learners bring them. 0: never."""
    shard_token: str = field(default="", repr=False)
    """What shards and a standby are shown: the token of the link, the run's, or the key of an operator."""
    link_token: str = field(default="", repr=False)
    """What a primary must show while this syncer stands by for it; empty: the run's token, or the key of an
    operator."""
    shard_tls_ca: str = ""
    """Certificates that those of shards and of a standby are checked against; empty: they have none."""
    bulk_port: int | None = 0
    """For large payloads past gRPC; 0: any free one, None: none."""

    @property
    def sharded(self) -> bool:
        return bool(self.shards) or self.peers


@dataclass(frozen=True, slots=True)
class ShardOptions:
    """How to run one shard."""

    listen: str
    """host:port; port 0 takes the one that this shard had before, or a free one."""
    run_folder: Path | None = None
    """Where its fragments and `shard.json` (the real address) go; None: they are in memory alone."""
    token: str = field(default="", repr=False)
    keys: Path | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    take_over: bool = False
    """Start although another shard holds the folder; that one ends."""
    metrics: str = ""
    """HOST:PORT where a Prometheus may ask; empty: nowhere."""
    metrics_folder: Path | None = None
    """Where a Prometheus finds out about that; None: beside the fragments, in `metrics`."""
    link_token: str = field(default="", repr=False)
    """What a coordinator must show; empty: the run's token, which learners have, too, or the key of an operator."""
    join: ClientOptions | None = None
    """The syncer of a run that it comes to by itself; it hands its fragments over before it goes."""
    address: str = ""
    """host:port under which syncer and learners find it; empty: as `listen`."""
    bulk_port: int | None = 0
    """For large payloads past gRPC; 0: any free one, None: none."""


def run_shard(options: ShardOptions) -> int:
    """Run a shard until SIGTERM or SIGINT; returns the exit status."""
    from atoll.syncer.shard_serve import run

    return run(options)


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """How to run one relay."""

    upstream: ClientOptions
    """The syncer, or another relay."""
    listen: str
    token: str = field(default="", repr=False)
    tls_certificate: str | None = None
    tls_key: str | None = None
    metrics: str = ""
    metrics_folder: Path | None = None
    merge: bool = True
    """Merge contributions here, where the run allows it."""
    bulk_port: int | None = 0
    """For large payloads past gRPC; 0: any free one, None: none."""
    run_folder: Path | None = None
    """Where `relay.json` (the real address) goes."""


def run_relay(options: RelayOptions) -> int:
    """Run a relay until SIGTERM or SIGINT; returns the exit status."""
    from atoll.syncer.relay_serve import run

    return run(options)


def run_syncer(options: SyncerOptions) -> int:
    """Run a syncer until SIGTERM, SIGINT or the end of its run; returns the exit status."""
    from atoll.syncer.serve import run

    return run(options)
