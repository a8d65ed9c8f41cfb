"""The options that several commands share, each with its help text.

They default to None, which means "not given": then a settings file applies, then the method's own settings, then the
preset, then the default. A `--preset` on the command line wins over the file, as any option does.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast

import typer

from atoll.cli.terminal import warn
from atoll.core import (
    ADAPTIVES,
    CODECS,
    CORRECTIONS,
    MERGES,
    OUTER_SCHEDULES,
    OUTERS,
    PACING,
    PARTIALS,
    ROBUSTS,
    SIZES,
    SYNC_PRESETS,
    WEIGHTS,
)
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.launch import FaultPlanner, View

OptionPanel = Mapping[str, Any]
"""What a parameter is annotated with, by its name."""
Command = TypeVar("Command", bound=Callable[..., None])

LINK_TOKEN = "ATOLL_LINK_TOKEN"
"""The variable with what a syncer shows its shards and its standby; LINK_TOKEN_FILE names a file with it."""

Token = Annotated[
    str,
    typer.Option(
        envvar="ATOLL_TOKEN",
        help="The run token itself, for tests: every user of this machine can read a command line. Use --token-file.",
    ),
]
TokenFile = Annotated[
    str,
    typer.Option(
        envvar="ATOLL_TOKEN_FILE",
        help="File with the run token that learners must show (needed beyond this machine); only you may read it.",
    ),
]
TlsCa = Annotated[
    str,
    typer.Option(
        envvar="ATOLL_TLS_CA",
        help="Certificate file (PEM) that the syncer's is checked against; on its own machine the run folder names it.",
    ),
]
TlsName = Annotated[
    str, typer.Option(help="Name that the syncer's certificate holds, where it is reached under another one.")
]
PageTokenFile = Annotated[
    str,
    typer.Option(
        envvar="ATOLL_PAGE_TOKEN_FILE",
        help="File with the token that viewers of the page must show (needed beyond this machine).",
    ),
]
Dash = Annotated[
    str | None,
    typer.Option(
        "--dash",
        help="Serve the live page of the run at HOST:PORT while it goes on; port 0: any free one.",
        metavar="HOST:PORT",
    ),
]
Metrics = Annotated[
    str,
    typer.Option(
        envvar="ATOLL_METRICS",
        help="HOST:PORT where Prometheus may ask: the syncer there, learner r at the port 1 + r above; port 0: any.",
    ),
]
LOG_FORMATS = ("text", "json")
BulkPort = Annotated[
    str,
    typer.Option(
        help="Port for payloads of 1 MiB and more, past gRPC; 0: any free one; off: gRPC carries them. A learner that "
        "cannot reach it uses gRPC."
    ),
]
OwnMetrics = Annotated[
    str, typer.Option(envvar="ATOLL_METRICS", help="HOST:PORT where Prometheus may ask (default nowhere).")
]
MetricsFolder = Annotated[
    Path | None,
    typer.Option(help="Where the file that tells Prometheus of it is written (default RUN_FOLDER/metrics)."),
]
LogFormat = Annotated[
    str,
    typer.Option(envvar="ATOLL_LOG_FORMAT", help="text, or json: one object with time, level and text for each line."),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings from a TOML file; options given here win over it.")
]
Out = Annotated[str | None, typer.Option(help="Run folder (default a new one under runs/).")]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of standard output.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads per learner (default cores / learners).")]


def bulk_port(text: str) -> int | None:
    """What --bulk-port says; None: off."""
    if text == "off":
        return None
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise ConfigError(f"--bulk-port {text!r} is no port; give one from 1 to 65535, 0 for any free one, or off")
    return int(text)


def panel(title: str, **options: tuple[type, str]) -> OptionPanel:
    """Options under one heading of the help text: type and help of each by its name. Not given means None."""
    return {
        name: Annotated[
            kind | None,
            typer.Option(*([_on_off(name)] if kind is bool else []), help=text, rich_help_panel=title),
        ]
        for name, (kind, text) in options.items()
    }


def _on_off(name: str) -> str:
    option = name.replace("_", "-")
    return f"--{option}/--no-{option}"


def takes(*panels: OptionPanel, only: Collection[str] = ()) -> Callable[[Command], Command]:
    """Add these options (or some of them) to a command, which gets them as `**named`. More can be added afterwards."""
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for panel in panels
        for name, annotation in panel.items()
        if not only or name in only
    ]

    def extended(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        kept = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = own.replace(parameters=[*kept, *added])  # type: ignore[attr-defined]
        return command

    return extended


SYNC = panel(
    "Synchronisation",
    preset=(
        str,
        f"Settings of the synchronisation under one name: {', '.join(SYNC_PRESETS)} (H=24, P=24, K=1 with grace, "
        "rda, overwrite). Options given here win over it (default none).",
    ),
    sync_every=(int, "Inner steps between two rounds of the same fragment (H) (default 8)."),
    fragments=(int, "Parts the model is synchronised in (P) (default by its size, up to H and 24; diloco: 1)."),
    overlap=(int, "Steps that hide a round (tau); 0: learners wait (default 2; diloco: 0)."),
    quorum=(str, "Contributions that close a round: a number, 50%, or all (default 50%)."),
    grace_cap=(float, "Longest wait for more after the quorum, in steps; 0: none (default 1)."),
    weights=(str, f"Weight of a contribution: {', '.join(WEIGHTS)} (default {WEIGHTS[0]})."),
    sizes=(str, f"Tokens per step that count for weights: {', '.join(SIZES)} (default {SIZES[0]})."),
    share_max=(float, "The most that one learner weighs in a merge, as a share; 1: no limit (default 1)."),
    merge=(str, f"How deltas are merged: {', '.join(MERGES.names())} (default half-rda)."),
    outer=(str, f"Outer optimizer: {', '.join(OUTERS.names())} (default nesterov)."),
    outer_lr=(float, "Learning rate of the outer step (default 0.7)."),
    outer_momentum=(float, "Momentum of the outer step (default 0.3)."),
    outer_schedule=(
        str,
        f"Outer learning rate over the run's tokens: {', '.join(OUTER_SCHEDULES)}; down to a tenth (default constant).",
    ),
    momentum_restart=(int, "Versions of a fragment after which its outer momentum starts anew; 0: never (default 0)."),
    correction=(str, f"Turn deltas that disagree with the outer momentum: {', '.join(CORRECTIONS)} (default none)."),
    partial=(str, f"Step of a merge without some of those asked: {', '.join(PARTIALS)} (default scaled)."),
    robust=(str, f"What a merge does about a learner that lies: {', '.join(ROBUSTS)} (default off)."),
    codec_up=(str, f"Encoding of contributions: {', '.join(CODECS.names())}; topk:2% keeps 2% (default int4)."),
    codec_down=(str, f"Encoding of updates: {', '.join(CODECS.names())}; topk:10% keeps 10% (default int4)."),
    adaptive=(str, f"Codecs and periods follow links and learning: {', '.join(ADAPTIVES)} (default off)."),
    period_min=(int, "With --adaptive: the fewest steps between two rounds of a fragment (default 4)."),
    period_max=(int, "With --adaptive: the most steps between two rounds of a fragment (default 64)."),
    codec_ladder=(
        str,
        "With --adaptive: what contributions may be encoded in, such as int8,int4,int2 (default: codec_up and less).",
    ),
    pacing=(str, f"Steps between two rounds of a fragment: {', '.join(PACING.names())} (default fixed)."),
    feedback_up=(bool, "What encoding a contribution loses goes into the next one (default on)."),
    feedback_down=(bool, "What encoding an update loses goes into the next one (default on)."),
    adopt=(str, "What learners do with an update: rebase, overwrite or mix:ALPHA (default rebase)."),
)
KEEPING = panel(
    "Durability",
    durability=(
        str,
        "When commits reach the disk: commit (before they are published), interval, none (default commit).",
    ),
    durability_interval=(str, "Time between two writes with --durability interval (default 30s)."),
    snapshots=(str, "Where snapshots of the run go: any fsspec URL (default nowhere)."),
    snapshot_every=(str, "Time between two snapshots: 90s, 5m, 1h (default 5m)."),
    keep=(int, "How many of the newest snapshots are kept (default 3)."),
    snapshot_options=(
        str,
        'JSON object for the snapshots\' file system, such as {"endpoint_url": "https://..."}. It is kept in the '
        "run folder: put credentials into the environment instead (ATOLL_SNAPSHOT_OPTIONS, or AWS_...).",
    ),
    record=(bool, "Record what every merge is made from, so that `atoll replay` can make it again (default off)."),
)


def run_token(context: typer.Context, token: str, token_file: str) -> str:
    """The run token. What is on the command line wins over the environment, and there a token over a file."""
    from atoll.wire import read_token

    typed = [name for name in ("token", "token_file") if _is_typed(context, name)]
    if len(typed) == 2:
        raise ConfigError("--token and --token-file both name the run token; leave --token away")
    if "token" in typed:
        warn("a token on the command line can be read by every user of this machine; use --token-file or ATOLL_TOKEN")
    return read_token("" if "token_file" in typed else token, token_file)


def link_token() -> str:
    """What a syncer shows its shards and its standby, where that is not the run's token."""
    from atoll.wire import read_token

    return read_token(os.environ.get(LINK_TOKEN, ""), os.environ.get(f"{LINK_TOKEN}_FILE", ""))


def page_token(page_token_file: str) -> str:
    """What viewers of the live page must show."""
    from atoll.wire import read_token

    return read_token("", page_token_file)


def shard_addresses(text: str) -> tuple[str, ...]:
    """The addresses in a list with commas. Raises ConfigError for one that cannot be, and for one that comes twice."""
    from atoll.wire import split_address

    places = tuple(place.strip() for place in text.split(",")) if text else ()
    for place in places:
        if split_address(place)[1] == 0:
            raise ConfigError(f"shard {place!r} has port 0; give the port that the shard printed")
    twice = sorted({place for place in places if places.count(place) > 1})
    if twice:
        raise ConfigError(f"shard {twice[0]} is given twice; give each shard once")
    return places


def snapshot_options(context: typer.Context, kept: str) -> str:
    """The options of the snapshots' file system: those that were set, and over them those in ATOLL_SNAPSHOT_OPTIONS,
    which may hold credentials because nothing keeps them."""
    from atoll.launch import holds_credentials, parse_options

    if _is_typed(context, "snapshot_options") and holds_credentials(kept):
        warn(
            "--snapshot-options may hold a credential, and a command line can be read by every user of this machine; "
            "put it into ATOLL_SNAPSHOT_OPTIONS"
        )
    private = parse_options(os.environ.get("ATOLL_SNAPSHOT_OPTIONS", ""), name="ATOLL_SNAPSHOT_OPTIONS")
    return json.dumps({**parse_options(kept), **private})


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def use_metrics(address: str) -> None:
    """The processes that are started from here on tell their metrics."""
    if address:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--metrics takes HOST:PORT, not {address!r}; such as 127.0.0.1:9400")
        os.environ["ATOLL_METRICS"] = address


def page_beside(
    address: str | None, say: Callable[[str], None], inner: Callable[[Path], View] | None = None
) -> Callable[[Path], View] | None:
    """What makes the view of a run folder: with an address also the live page, before whatever else is shown."""
    if address is None:
        return inner
    from atoll.page import PageOptions, PageView

    options = PageOptions(listen=address, token=page_token(os.environ.get("ATOLL_PAGE_TOKEN_FILE", "")))
    return lambda folder: PageView(folder, options, say=say, inner=inner(folder) if inner is not None else None)


def faults_of(context: typer.Context) -> FaultPlanner:
    """Who carries out faults on purpose. `atoll.app` hands that in, because it stands above the product."""
    from atoll.launch import WITHOUT_FAULTS

    return cast("FaultPlanner", context.obj()) if context.obj is not None else WITHOUT_FAULTS


def given(arguments: Mapping[str, Any], *apart: str) -> tuple[dict[str, Any], str]:
    """What the settings file and the options come to, and where a wrong name must have come from.

    `arguments` are all arguments of a command, `config` and `named` among them; those in `apart` are no settings.
    """
    from atoll.launch import read_config_file, take_preset

    arguments = {**arguments, **arguments["named"]}
    config_file: Path | None = arguments["config"]
    values = read_config_file(config_file) if config_file is not None else {}
    if arguments.get("preset") is not None:
        _, preset = take_preset({"preset": arguments["preset"]})
        values = {name: value for name, value in values.items() if name not in preset}
    values.update({n: v for n, v in arguments.items() if v is not None and n not in ("config", "named", *apart)})
    return values, str(config_file or "the command line")
