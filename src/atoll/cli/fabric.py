"""Parts that share a syncer's work: `atoll shard` and `atoll relay`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options as o
from atoll.cli.parts import certificate_of
from atoll.cli.terminal import logged_as
from atoll.errors import ConfigError, LaunchError
from atoll.private import make_private_folder


def shard(
    *,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0: any free one.")] = "127.0.0.1:7078",
    bulk_port: o.BulkPort = "0",
    run_folder: Annotated[
        Path | None, typer.Option(help="Where its fragments and its address are written (default nowhere).")
    ] = None,
    join: Annotated[
        str,
        typer.Option(
            help="HOST:PORT of a syncer that leads shards: come to its run, and hand the fragments over on SIGTERM."
        ),
    ] = "",
    address: Annotated[
        str, typer.Option(help="With --join: HOST:PORT where syncer and learners reach this shard (default: --listen).")
    ] = "",
    tls_ca: o.TlsCa = "",
    token: o.Token = "",
    token_file: o.TokenFile = "",
    keys: Annotated[
        Path | None, typer.Option(help="Folder or registry of `atoll keys`, a copy of the syncer's.")
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="Certificate file (PEM) for TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Key file (PEM) of the certificate.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the folder over from a shard that still holds it; that one ends.")
    ] = False,
    metrics: o.OwnMetrics = "",
    metrics_folder: o.MetricsFolder = None,
    log_format: o.LogFormat = "text",
    context: typer.Context,
) -> None:
    """Run a shard: it has some of a run's fragments, for `atoll syncer --shards HOST:PORT,...`.

    It has their parameters, merges and commits, and learners push and fetch there. Start it before or after the syncer,
    on any machine that both can reach. SIGTERM ends it; the same command again goes on from its last commit. With
    --join it comes to a run that goes on, and others take its fragments before it ends (with `atoll keys`,
    --token-file is an operator's).
    """
    if (tls_certificate is None) != (tls_key is None):
        raise ConfigError("TLS needs both files; give --tls-certificate and --tls-key together")
    if keys is not None and tls_certificate is None:
        tls_certificate, tls_key = certificate_of(keys)
    _make_folder(run_folder)
    from atoll.syncer import ShardOptions, run_shard
    from atoll.wire import ClientOptions, split_address

    if join and not address and split_address(listen)[0] in ("0.0.0.0", "::"):
        raise ConfigError(f"nobody can reach {listen}; say with --address under which HOST:PORT this shard is found")
    if address:
        address = o.shard_addresses(address)[0]
    shown = o.run_token(context, token, token_file)
    served = ShardOptions(
        listen=listen,
        bulk_port=o.bulk_port(bulk_port),
        run_folder=run_folder,
        token=shown if keys is None else "",
        keys=keys,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        take_over=take_over,
        metrics=metrics,
        metrics_folder=metrics_folder,
        join=ClientOptions(address=join, token=shown, tls_ca=tls_ca) if join else None,
        address=address,
        link_token=o.link_token(),
    )
    with logged_as(log_format):
        code = run_shard(served)
    raise typer.Exit(code)


def relay(
    *,
    upstream: Annotated[str, typer.Option(help="HOST:PORT,... of the syncer, or of another relay.")],
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0: any free one.")] = "127.0.0.1:7079",
    bulk_port: o.BulkPort = "0",
    run_folder: Annotated[Path | None, typer.Option(help="Where its address is written (default nowhere).")] = None,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    tls_certificate: Annotated[str | None, typer.Option(help="Certificate file (PEM) for TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Key file (PEM) of the certificate.")] = None,
    metrics: o.OwnMetrics = "",
    metrics_folder: o.MetricsFolder = None,
    log_format: o.LogFormat = "text",
    merge: Annotated[bool, typer.Option(help="Merge contributions here, where the run's settings allow it.")] = True,
    context: typer.Context,
) -> None:
    """Run a relay for the learners of a site: ATOLL_SYNCER=RELAY,SYNCER where they run.

    Every update crosses the link to the syncer once for all of them, and what they send to a round crosses it as one
    payload. The syncer sees learners as without a relay. Learners and relay use the run's one token (not `atoll keys`).
    """
    if (tls_certificate is None) != (tls_key is None):
        raise ConfigError("TLS needs both files; give --tls-certificate and --tls-key together")
    _make_folder(run_folder)
    from atoll.syncer import RelayOptions, run_relay
    from atoll.wire import ClientOptions

    shown = o.run_token(context, token, token_file)
    place = ClientOptions(address=upstream, token=shown, tls_ca=tls_ca, tls_name=tls_name)
    port = o.bulk_port(bulk_port)
    served = RelayOptions(
        place, listen, shown, tls_certificate, tls_key, metrics, metrics_folder, merge, port, run_folder
    )
    with logged_as(log_format):
        code = run_relay(served)
    raise typer.Exit(code)


def _make_folder(run_folder: Path | None) -> None:
    if run_folder is None:
        return
    try:
        make_private_folder(run_folder)
    except OSError as error:
        raise LaunchError(f"{run_folder} cannot be written ({error.strerror}); give another --run-folder") from error
