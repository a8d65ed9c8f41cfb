"""The options that several commands share, each with its help text.

They default to None, which means "not given": then a settings file applies, then the method's own settings, then the
preset, then the default. A `--preset` on the command line wins over the file, as any option does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from atoll.core.config import CODECS, CORRECTIONS, MERGES, OUTER_SCHEDULES, OUTERS, PARTIALS, WEIGHTS
from atoll.core.presets import SYNC_PRESETS

if TYPE_CHECKING:
    from atoll.launch.faults import FaultPlanner

_SYNC = "Synchronisation"
_KEEPING = "Durability"
_CHAOS = "Chaos"

Token = Annotated[
    str, typer.Option(envvar="ATOLL_TOKEN", help="Run token that learners must show; needed beyond this machine.")
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
Preset = Annotated[
    str | None,
    typer.Option(
        help=f"Settings of the synchronisation under one name: {', '.join(SYNC_PRESETS)} (H=24, P=24, K=1 with grace, "
        "rda, overwrite). Options given here win over it (default none).",
        rich_help_panel=_SYNC,
    ),
]
SyncEvery = Annotated[
    int | None,
    typer.Option(help="Inner steps between two rounds of the same fragment (H) (default 8).", rich_help_panel=_SYNC),
]
Fragments = Annotated[
    int | None,
    typer.Option(
        help="Parts the model is synchronised in (P) (default by its size, up to H and 24; diloco: 1).",
        rich_help_panel=_SYNC,
    ),
]
Overlap = Annotated[
    int | None,
    typer.Option(help="Steps that hide a round (tau); 0: learners wait (default 2; diloco: 0).", rich_help_panel=_SYNC),
]
Quorum = Annotated[
    str | None,
    typer.Option(help="Contributions that close a round: a number, 50%, or all (default 50%).", rich_help_panel=_SYNC),
]
GraceCap = Annotated[
    float | None,
    typer.Option(help="Longest wait for more after the quorum, in steps; 0: none (default 1).", rich_help_panel=_SYNC),
]
Weights = Annotated[
    str | None,
    typer.Option(help=f"Weight of a contribution: {', '.join(WEIGHTS)} (default {WEIGHTS[0]}).", rich_help_panel=_SYNC),
]
Merge = Annotated[
    str | None,
    typer.Option(help=f"How deltas are merged: {', '.join(MERGES.names())} (default half-rda).", rich_help_panel=_SYNC),
]
Outer = Annotated[
    str | None, typer.Option(help=f"Outer optimizer: {', '.join(OUTERS.names())} (default).", rich_help_panel=_SYNC)
]
OuterLr = Annotated[
    float | None, typer.Option(help="Learning rate of the outer step (default 0.7).", rich_help_panel=_SYNC)
]
OuterMomentum = Annotated[
    float | None, typer.Option(help="Momentum of the outer step (default 0.3).", rich_help_panel=_SYNC)
]
OuterSchedule = Annotated[
    str | None,
    typer.Option(
        help=f"Outer learning rate over the run's tokens: {', '.join(OUTER_SCHEDULES)}; down to a tenth (default "
        "constant).",
        rich_help_panel=_SYNC,
    ),
]
MomentumRestart = Annotated[
    int | None,
    typer.Option(
        help="Versions of a fragment after which its outer momentum starts anew; 0: never (default 0).",
        rich_help_panel=_SYNC,
    ),
]
Partial = Annotated[
    str | None,
    typer.Option(
        help=f"Step of a merge without some of those asked: {', '.join(PARTIALS)} (default scaled).",
        rich_help_panel=_SYNC,
    ),
]
Correction = Annotated[
    str | None,
    typer.Option(
        help=f"Turn deltas that disagree with the outer momentum: {', '.join(CORRECTIONS)} (default none).",
        rich_help_panel=_SYNC,
    ),
]
FeedbackUp = Annotated[
    bool | None,
    typer.Option(
        "--feedback-up/--no-feedback-up",
        help="What encoding a contribution loses goes into the next one (default on).",
        rich_help_panel=_SYNC,
    ),
]
FeedbackDown = Annotated[
    bool | None,
    typer.Option(
        "--feedback-down/--no-feedback-down",
        help="What encoding an update loses goes into the next one (default on).",
        rich_help_panel=_SYNC,
    ),
]
CodecUp = Annotated[
    str | None,
    typer.Option(help=f"Encoding of contributions: {', '.join(CODECS.names())} (default int4).", rich_help_panel=_SYNC),
]
CodecDown = Annotated[
    str | None,
    typer.Option(help=f"Encoding of updates: {', '.join(CODECS.names())} (default int4).", rich_help_panel=_SYNC),
]
Adopt = Annotated[
    str | None,
    typer.Option(
        help="What learners do with an update: rebase, overwrite or mix:ALPHA (default rebase).", rich_help_panel=_SYNC
    ),
]

Durability = Annotated[
    str | None,
    typer.Option(
        help="When commits reach the disk: commit (before they are published), interval, none (default commit).",
        rich_help_panel=_KEEPING,
    ),
]
DurabilityInterval = Annotated[
    str | None,
    typer.Option(help="Time between two writes with --durability interval (default 30s).", rich_help_panel=_KEEPING),
]
Snapshots = Annotated[
    str | None,
    typer.Option(help="Where snapshots of the run go: any fsspec URL (default nowhere).", rich_help_panel=_KEEPING),
]
SnapshotEvery = Annotated[
    str | None, typer.Option(help="Time between two snapshots: 90s, 5m, 1h (default 5m).", rich_help_panel=_KEEPING)
]
Keep = Annotated[
    int | None, typer.Option(help="How many of the newest snapshots are kept (default 3).", rich_help_panel=_KEEPING)
]
SnapshotOptions = Annotated[
    str | None,
    typer.Option(
        help='JSON object for the snapshots\' file system, such as {"endpoint_url": "https://..."}. It is kept in the '
        "run folder: put credentials into the environment instead.",
        rich_help_panel=_KEEPING,
    ),
]
Record = Annotated[
    bool | None,
    typer.Option(
        "--record/--no-record",
        help="Record what every merge is made from, so that `atoll replay` can make it again (default off).",
        rich_help_panel=_KEEPING,
    ),
]

Chaos = Annotated[
    str | None,
    typer.Option(
        help="Faults on purpose: none, demo (kill one learner, slow another), storm (all kinds over the run), or a "
        "TOML file of faults (default none).",
        rich_help_panel=_CHAOS,
    ),
]
ChaosSeed = Annotated[int | None, typer.Option(help="Seed of what a storm draws (default 0).", rich_help_panel=_CHAOS)]
StormMinutes = Annotated[
    float | None,
    typer.Option(
        help="Length of the storm where no budget of steps and time tells it (default 10).", rich_help_panel=_CHAOS
    ),
]

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Settings from a TOML file; options given here win over it.")
]
Out = Annotated[str | None, typer.Option(help="Run folder (default a new one under runs/).")]
Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on the last line of standard output.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads per learner (default cores / learners).")]


def faults_of(context: typer.Context) -> FaultPlanner:
    """Who carries out faults on purpose. `atoll.app` hands that in, because it stands above the product."""
    from atoll.launch.faults import WITHOUT_FAULTS

    return cast("FaultPlanner", context.obj()) if context.obj is not None else WITHOUT_FAULTS


def given(arguments: Mapping[str, Any], *apart: str) -> tuple[dict[str, Any], str]:
    """What the settings file and the options come to, and where a wrong name must have come from.

    `arguments` are all arguments of a command, `config` among them; those named in `apart` are no settings.
    """
    from atoll.launch.options import read_config_file, take_preset

    config_file: Path | None = arguments["config"]
    values = read_config_file(config_file) if config_file is not None else {}
    if arguments.get("preset") is not None:
        _, preset = take_preset({"preset": arguments["preset"]})
        values = {name: value for name, value in values.items() if name not in preset}
    values.update({n: v for n, v in arguments.items() if v is not None and n not in ("config", *apart)})
    return values, str(config_file or "the command line")
