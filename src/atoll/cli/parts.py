"""The parts by hand: `atoll syncer` on one machine, and `atoll report` afterwards. (`atoll status`: status.py.)"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, logged_as, print_json
from atoll.core import SyncConfig
from atoll.errors import ConfigError, LaunchError
from atoll.private import make_private_folder

OF_THE_PORT = (
    "listen",
    "bulk_port",
    "run_folder",
    "token",
    "token_file",
    "keys",
    "tls_certificate",
    "tls_key",
    "tls_ca",
)
PEERS = "learners"
"""As --shards: those that learners bring along."""
OF_THE_SHARDS = ("shards", "shard_lost_after")
OF_THE_PLACE = ("standby", "standby_after", "model", "replica", "replicate", "replicate_or_go_on")
OF_THE_PROCESS = (
    "take_over",
    "new_run",
    "first_start",
    "must_continue",
    "end_when_left",
    "end_when_finished",
    "stay",
    "plain",
    "title",
    "metrics",
    "log_format",
    "context",
)
"""Options that say nothing about the run."""
VIEW_S = 0.2
"""How often the live view may look; it draws less often than that."""
VIEW_END_S = 5.0
"""For the last picture."""


@o.takes(o.SYNC, o.KEEPING)
def syncer(
    *,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0: any free one.")] = "127.0.0.1:7077",
    bulk_port: o.BulkPort = "0",
    learners: Annotated[int | None, typer.Option(help="Learners that are expected (M) (default 1).")] = None,
    tokens_budget: Annotated[
        int | None, typer.Option(help="Stop the run after this many tokens; 0: the learners decide (default 0).")
    ] = None,
    run_folder: Annotated[
        Path | None,
        typer.Option(help="Where state, events, the address and the final model are written (default nowhere)."),
    ] = None,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    keys: Annotated[
        Path | None,
        typer.Option(
            help="Folder or registry of `atoll keys`: each learner has its own token, and TLS its certificate."
        ),
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(help="Certificate file (PEM) for TLS.")] = None,
    tls_key: Annotated[str | None, typer.Option(help="Key file (PEM) of the certificate.")] = None,
    shards: Annotated[
        str,
        typer.Option(
            help="HOST:PORT,... of the `atoll shard` processes that have the fragments: this one then only "
            "coordinates. Or learners: shards come by themselves (`atoll shard --join`)."
        ),
    ] = "",
    shard_lost_after: Annotated[
        str,
        typer.Option(
            help="Give up a shard that is away for so long: others get its fragments, and learners bring them; 0: "
            "never (default 60s with --shards learners, else 0)."
        ),
    ] = "",
    tls_ca: Annotated[
        str,
        typer.Option(
            envvar="ATOLL_TLS_CA", help="Certificate file (PEM) that a shard's or a standby's is checked against."
        ),
    ] = "",
    model: Annotated[
        bool,
        typer.Option(
            help="Write RUN/model.safetensors at the end; it takes 4 bytes per parameter of this process's memory."
        ),
    ] = True,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby", help="Wait beside the syncer of this run folder or these snapshots; serve when it is gone."
        ),
    ] = False,
    standby_after: Annotated[
        str, typer.Option(help="How long a syncer that may be frozen must be silent before a standby takes over.")
    ] = "15s",
    replica: Annotated[
        bool,
        typer.Option(
            "--replica", help="Be a standby that shares nothing with its primary: that one sends all to --listen here."
        ),
    ] = False,
    replicate: Annotated[
        str,
        typer.Option(help="HOST:PORT of a syncer with --replica: nothing is published before it is on its disk, too."),
    ] = "",
    replicate_or_go_on: Annotated[
        bool,
        typer.Option(
            "--replicate-or-go-on",
            help="Publish without that standby once it is away for --standby-after; it may have taken over as well.",
        ),
    ] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take the run over from a syncer that still holds its state or snapshots."),
    ] = False,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Where no state is left, begin anew, whatever run learners may hold.")
    ] = False,
    first_start: Annotated[bool, typer.Option("--first-start", hidden=True)] = False,
    must_continue: Annotated[
        bool, typer.Option("--must-continue", help="End with an error where there is no state and no snapshot.")
    ] = False,
    end_when_left: Annotated[
        bool, typer.Option("--end-when-left", help="End once everybody who was in the run has left (or is lost).")
    ] = False,
    end_when_finished: Annotated[
        bool,
        typer.Option(
            "--end-when-finished",
            help="End once every learner's script has ended; who got SIGTERM (preempted) or is lost is waited for.",
        ),
    ] = False,
    stay: Annotated[
        bool, typer.Option("--stay", help="Stay after the tokens budget is spent and everybody has left.")
    ] = False,
    title: Annotated[str, typer.Option(help="What views call the run (default the name of its folder).")] = "",
    metrics: o.OwnMetrics = "",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view, also on a terminal.")] = False,
    log_format: o.LogFormat = "text",
    config: o.ConfigFile = None,
    context: typer.Context,
    **named: Any,
) -> None:
    """Run a syncer that learners join: set ATOLL_SYNCER=HOST:PORT, and ATOLL_TOKEN_FILE, where they run.

    SIGTERM ends it. It also ends when its --tokens-budget is spent and everybody has left. The model is in the run
    folder as soon as nobody trains any more.

    With a run folder its state survives: the same command again goes on from the last commit, with the run's own
    synchronisation settings where the command names none.
    """
    values, where = o.given(locals(), *OF_THE_PORT, *OF_THE_SHARDS, *OF_THE_PLACE, *OF_THE_PROCESS)
    if new_run and must_continue:
        raise ConfigError("--new-run begins a run and --must-continue forbids it; give one of them")
    if (tls_certificate is None) != (tls_key is None):
        raise ConfigError("TLS needs both files; give --tls-certificate and --tls-key together")
    if keys is not None and tls_certificate is None:
        tls_certificate, tls_key = certificate_of(keys)
    from atoll.launch import (
        durability_config,
        durability_names,
        parse_duration,
        split_values,
        sync_values,
        take_preset,
        write_result_by_hand,
    )

    rest, beneath = take_preset(values)
    own, sync = split_values(rest, ("learners", "tokens_budget", *durability_names()), where=where)
    kept = durability_config({name: own[name] for name in durability_names() if name in own})
    if run_folder is None and ("durability" in own and kept.durability != "none"):
        raise ConfigError(f"durability {kept.durability} needs a place on disk; give --run-folder")
    if run_folder is None and kept.record:
        raise ConfigError("a recording needs a place on disk; give --run-folder, or --no-record")
    if shards and kept.record:
        raise ConfigError("merges on shards cannot be replayed yet, so that they are not recorded; give --no-record")
    derived = {"learners": "learners_expected", "tokens_budget": "tokens_budget"}
    settings = sync_values({**beneath, **sync})
    settings |= {field: own[name] for name, field in derived.items() if name in own}
    if kept.snapshots == "" and (run_folder is None or not (run_folder / "state").exists()):
        SyncConfig.from_dict(settings)  # a run that begins: what is wrong is said before anything is made
    if run_folder is not None:
        try:
            make_private_folder(run_folder)
        except OSError as error:
            raise LaunchError(
                f"the run folder {run_folder} cannot be written ({error.strerror}); give another --run-folder"
            ) from error
    from atoll.syncer import EXIT_FENCED, SyncerOptions, run_syncer

    shown = o.run_token(context, token, token_file)
    chosen = SyncerOptions(
        listen=listen,
        bulk_port=o.bulk_port(bulk_port),
        config=settings,
        run_folder=run_folder,
        token=shown if keys is None or not (shards or replicate) else "",
        keys=keys,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        standby=standby or replica,
        replica=replica,
        replicate=replicate,
        replicate_or_go_on=replicate_or_go_on,
        standby_after_s=parse_duration("standby_after", standby_after),
        model=model,
        shards=o.shard_addresses(shards) if shards != PEERS else (),
        peers=shards == PEERS,
        shard_lost_after_s=parse_duration("shard_lost_after", shard_lost_after or ("60s" if shards == PEERS else "0")),
        shard_token=o.link_token() or shown,
        link_token=o.link_token(),
        shard_tls_ca=tls_ca,
        durability=kept.durability if run_folder is not None else "none",
        durability_interval_s=kept.durability_interval,
        snapshots=kept.snapshots,
        snapshot_every_s=kept.snapshot_every,
        snapshots_keep=kept.keep,
        snapshot_options=o.snapshot_options(context, kept.snapshot_options),
        record=kept.record,
        take_over=take_over,
        new_run=new_run,
        first_start=first_start,
        must_continue=must_continue,
        end_when_left=end_when_left,
        end_when_finished=end_when_finished,
        stay=stay,
        title=title,
        metrics=metrics,
        lines=plain or log_format == "json" or run_folder is None or not sys.stdout.isatty(),
    )
    if run_folder is None:
        with logged_as(log_format):
            code = run_syncer(chosen)
        raise typer.Exit(code)
    with logged_as(log_format) if chosen.lines else _live_view(run_folder):
        code = run_syncer(chosen)
    served = (not standby and not replica) or (run_folder / "events").exists()
    if code != EXIT_FENCED and served:  # else the run is another syncer's, or a standby's turn never came
        write_result_by_hand(run_folder)
    if not chosen.lines and (run_folder / "model.safetensors").exists():
        human(json_wanted=False).print(f"published model: {run_folder}/model.safetensors", markup=False, soft_wrap=True)
    raise typer.Exit(code)


def certificate_of(keys: Path) -> tuple[str | None, str | None]:
    """The certificate that lies beside the registry, where there is one."""
    from atoll.keys import CERTIFICATE_FILE, KEY_FILE, registry_path

    folder = registry_path(keys).parent
    found = (folder / CERTIFICATE_FILE, folder / KEY_FILE)
    return (str(found[0]), str(found[1])) if all(path.exists() for path in found) else (None, None)


@contextlib.contextmanager
def _live_view(run_folder: Path) -> Iterator[None]:
    """Draw the run beside the syncer, which needs the main thread for its signals."""
    from atoll.dash import LiveView

    over = threading.Event()

    def draw() -> None:
        with LiveView(run_folder, console=human(json_wanted=False)) as view:
            while not over.wait(VIEW_S):
                view.refresh()

    thread = threading.Thread(target=draw, name="atoll-view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(VIEW_END_S)


def report(
    run_folder: Annotated[Path, typer.Argument(help="Folder of the run.")],
    *,
    json: o.Json = False,
) -> None:
    """Make report.html of a run again, from its events, and print the summary.

    With --json the numbers come last, as one object: those of RUN/result.json, and for any run folder what its events
    say (tokens and their ledger, steps by learner, goodput and where the time went, bytes, commits, restarts).
    """
    if not run_folder.is_dir():
        raise LaunchError(f"there is no run folder {run_folder}; give the folder that the run named, such as runs/...")
    from atoll.dash import print_summary, write_report

    console = human(json_wanted=json)
    path = write_report(run_folder)
    print_summary(run_folder, console)
    if json:
        from atoll.launch import report_numbers

        print_json({**report_numbers(run_folder), "run_folder": str(run_folder), "report": str(path)})
