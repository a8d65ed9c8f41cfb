"""`atoll plan`: what a job needs of its links, disks and processors, and the settings that follow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import human, print_json, save_text
from atoll.cli import options as o

if TYPE_CHECKING:
    from atoll.instruments.plan import Plan

EXIT_DOES_NOT_FIT = 1
_JOB = "The job"
_PLACES = "Links and machines"
SETTINGS = (
    *("sync_every", "fragments", "overlap", "quorum", "grace_cap", "codec_up", "codec_down"),
    *("adaptive", "period_min", "period_max", "codec_ladder"),
    *("durability", "durability_interval"),
)
"""Settings of a run that a plan can be told instead of choosing them."""
_FIELD_OF_OPTION = {"grace_cap": "grace_cap_steps"}


@o.takes(o.SYNC, o.KEEPING, only=SETTINGS)
def plan(
    *,
    job: Annotated[Path | None, typer.Option(help="Job file (TOML); options given here win over it.")] = None,
    parameters: Annotated[str | None, typer.Option(help="Size of the model: 300M, 12B.", rich_help_panel=_JOB)] = None,
    learners: Annotated[int | None, typer.Option(help="Learners (M); not with --region.", rich_help_panel=_JOB)] = None,
    step_s: Annotated[
        float | None, typer.Option(help="Seconds of one step of one learner.", rich_help_panel=_JOB)
    ] = None,
    tokens_per_step: Annotated[
        str | None, typer.Option(help="Tokens of one step of one learner, for times.", rich_help_panel=_JOB)
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens to train on (default 20 per parameter).", rich_help_panel=_JOB)
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Of what the other methods all-reduce: bf16, fp16, fp32 (default bf16).", rich_help_panel=_JOB
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Depth of the model (default usual for its size).", rich_help_panel=_JOB)
    ] = None,
    chips: Annotated[
        str | None, typer.Option(help="Chips of all learners together (default 0: no failures).", rich_help_panel=_JOB)
    ] = None,
    mtbi_years: Annotated[
        float | None, typer.Option(help="Years between two interruptions of a chip (default 1).", rich_help_panel=_JOB)
    ] = None,
    slice_chips: Annotated[
        int | None, typer.Option(help="Chips that fail and return together (default 256).", rich_help_panel=_JOB)
    ] = None,
    up_gbit: Annotated[
        float | None, typer.Option(help="Each learner's link to the syncer, Gbit/s.", rich_help_panel=_PLACES)
    ] = None,
    down_gbit: Annotated[
        float | None, typer.Option(help="Each learner's link from the syncer (default as up).", rich_help_panel=_PLACES)
    ] = None,
    rtt_ms: Annotated[
        float | None, typer.Option(help="Round trip to the syncer (default 50).", rich_help_panel=_PLACES)
    ] = None,
    region: Annotated[
        list[str] | None,
        typer.Option(
            help="A place whose learners share a link, once for each place: NAME:LEARNERS:GBIT:RTT_MS:STEP_S. GBIT may "
            "be UP/DOWN; the last two may be left out.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    sites: Annotated[
        int | None,
        typer.Option(
            help="Sites of about equal size, whose learners share a link of --up-gbit and --down-gbit: says how many "
            "shards and relays the job needs.",
            rich_help_panel=_PLACES,
        ),
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Shards, each on a host of its own (default as needed).", rich_help_panel=_PLACES)
    ] = None,
    relays: Annotated[
        bool | None, typer.Option(help="A relay at each site (default where it helps).", rich_help_panel=_PLACES)
    ] = None,
    host_gbyte: Annotated[
        float | None,
        typer.Option(help="Memory of the syncer's or a shard's host, GB (default 256).", rich_help_panel=_PLACES),
    ] = None,
    syncer_gbit: Annotated[
        float | None, typer.Option(help="The syncer's link, each way (default not checked).", rich_help_panel=_PLACES)
    ] = None,
    disk_gbyte_s: Annotated[
        float | None, typer.Option(help="What the syncer's disk takes, GB/s (default 1.3).", rich_help_panel=_PLACES)
    ] = None,
    merge_gbyte_s: Annotated[
        float | None,
        typer.Option(help="Memory traffic of merges, GB/s (default 24.2: two cores).", rich_help_panel=_PLACES),
    ] = None,
    encode_gparam_s: Annotated[
        float | None,
        typer.Option(
            help="What a learner's host encodes, Gparam/s (default 0.83: two cores).", rich_help_panel=_PLACES
        ),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Write the settings to this TOML file, for atoll run --config.")
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Compare this model with the published tables, and end.")
    ] = False,
    figures: Annotated[
        Path | None, typer.Option(help="With --published: write figures (PNG, HTML) to this folder.")
    ] = None,
    json: o.Json = False,
    **named: Any,
) -> None:
    """Plan a job: bandwidth each way, slack, quorum, goodput, time, memory, and the settings that follow.

    Settings that are not given are chosen, each with its reason. Exit status 1: the plan does not fit its own links.
    """
    arguments = {name: value for name, value in {**locals(), **named}.items() if value is not None}
    for name in ("named", "job", "region", "save", "published", "figures", "json"):
        arguments.pop(name, None)
    if published:
        if arguments or job is not None or region or save is not None:
            raise typer.BadParameter("--published is about the published tables: give none of a job's options with it")
        _published(json_wanted=json, figures=figures)
        return
    if figures is not None:
        raise typer.BadParameter("there are figures of the published tables only: give --published as well")
    if region:
        arguments["regions"] = region
    from atoll.errors import ConfigError
    from atoll.instruments.plan import job_from, make_plan, print_plan

    if save is not None:
        _check_folder(save)
    about, given = _split(arguments, job)
    made = make_plan(job_from(about), given)
    console = human(json_wanted=json)
    not_saved: ConfigError | None = None
    if save is not None and made.fits:  # before anything is said: whoever listens may have gone
        try:
            _save(made, save)
        except ConfigError as error:
            not_saved = error
    print_plan(made, console)
    if not_saved is not None:
        raise not_saved
    if save is not None and made.fits:
        console.print(f"the settings are in {save}: atoll run --config {save} -- ...", markup=False, soft_wrap=True)
    elif save is not None:
        console.print(f"{save} was not written, because the plan does not fit", style="yellow", markup=False)
    if json:
        print_json(made.to_dict())
    if not made.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _split(arguments: Mapping[str, Any], file: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what describes the job, settings that were chosen, by SyncConfig's names); options win over the file."""
    from atoll.instruments.plan import OWN, job_names
    from atoll.launch import parse_duration, read_config_file, split_values

    values = read_config_file(file) if file is not None else {}
    if "regions" in arguments or "up_gbit" in arguments:  # other places than the file's: none of those stays
        for name in ("regions", "learners", "up_gbit", "down_gbit"):
            values.pop(name, None)
    values.update(arguments)
    about, settings = split_values(values, (*job_names(), *OWN), where=str(file or "the command line"))
    given = {name: about.pop(name) for name in OWN if name in about}
    if "durability_interval" in given:
        given["durability_interval"] = parse_duration("durability_interval", given["durability_interval"])
    return about, {**{_FIELD_OF_OPTION.get(name, name): value for name, value in settings.items()}, **given}


def _check_folder(path: Path) -> None:
    """A slip in the path is said before the plan is made."""
    from atoll.errors import ConfigError

    if not path.parent.is_dir():
        raise ConfigError(f"--save {path}: there is no folder {path.parent}; give a file in a folder that exists")


def _save(made: Plan, path: Path) -> None:
    """Write what `atoll run` takes; it is read as `atoll run` would first, so that a saved file is a good one."""
    from atoll.errors import ConfigError
    from atoll.instruments.plan import headline
    from atoll.launch import LEARNERS_LOCAL_MAX, run_config, to_toml

    if made.job.learners > LEARNERS_LOCAL_MAX:
        raise ConfigError(
            f"--save {path}: the plan itself is fine, but atoll run, which would read the file, starts its learners on "
            f"one machine, at most {LEARNERS_LOCAL_MAX} of them, and the plan has {made.job.learners}; give the "
            "settings above to atoll syncer as options, and set ATOLL_SYNCER where the learners run"
        )
    values = made.options()
    run_config(values, where=str(path))
    save_text("--save", path, to_toml(values, comment=f"atoll plan: {headline(made.job)}"))


def _published(*, json_wanted: bool, figures: Path | None) -> None:
    from dataclasses import asdict

    from atoll.instruments.plan import agreement, claims, compare, print_published

    cells, others = compare(), claims()
    totals = agreement(cells)
    console = human(json_wanted=json_wanted)
    print_published(cells, totals, others, console)
    if figures is not None:
        from atoll.instruments.cli.paper_figures import draw_utilisation

        console.print(f"figures: {draw_utilisation(figures, cells)}", markup=False, soft_wrap=True)
    if json_wanted:
        print_json(
            {
                "agreement": [asdict(total) for total in totals],
                "cells": [asdict(cell) for cell in cells],
                "claims": [asdict(claim) for claim in others],
            }
        )
