"""`atoll doctor`: what is wrong here, on the way to a syncer, or in a run; and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, print_json

if TYPE_CHECKING:
    from atoll.launch import Finding

EXIT_ILL = 1
SIGNS = {"good": ("✓", "green"), "warn": ("!", "yellow"), "bad": ("✗", "bold red")}


def doctor(
    target: Annotated[
        str, typer.Argument(help="Run folder or HOST:PORT of a syncer (default: this machine alone).")
    ] = "",
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    json: o.Json = False,
    context: typer.Context,
) -> None:
    """Look at this machine (files, disk, GPUs, NUMA, clock), the way to a syncer (name, port, TLS, token, speed,
    clocks) and its run (learners, links, durability), and say what to do.

    It changes nothing: 32 MiB are written and deleted, and 512 KiB are sent each way. Exit status 1 if something is
    broken.
    """
    found = list(_findings(target, o.run_token(context, token, token_file), tls_ca, tls_name))
    console = human(json_wanted=json)
    for one in found:
        sign, style = SIGNS[one.level]
        console.print(
            f"{sign} {one.check}: {one.text}", style=style if one.level != "good" else "", markup=False, soft_wrap=True
        )
        if one.remedy:
            console.print(f"    → {one.remedy}", markup=False, soft_wrap=True)
    if json:
        print_json({"findings": [asdict(one) for one in found]})
    if any(one.level == "bad" for one in found):
        raise typer.Exit(EXIT_ILL)


def _findings(target: str, token: str, tls_ca: str, tls_name: str) -> Iterator[Finding]:
    from atoll.errors import LaunchError
    from atoll.launch import Finding, check_machine, check_syncer, how_it_ended, reach, run_folder_of

    folder = run_folder_of(target) if target else None
    yield from check_machine(folder.path if folder is not None else Path.cwd())
    if not target:
        return
    ended = how_it_ended(folder) if folder is not None else None
    if ended is not None:
        yield Finding("run", "good", f"over: {ended.reason}, after {ended.commits:,} commits")
        return
    try:
        yield from check_syncer(reach(target, token=token, tls_ca=tls_ca, tls_name=tls_name).options)
    except LaunchError as error:
        text, _, remedy = str(error).rpartition("; ")
        yield Finding("syncer", "bad", text or str(error), remedy)
