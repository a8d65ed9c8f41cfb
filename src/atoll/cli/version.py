"""`atoll version`: this build, and with --check whether it works together with a syncer that runs."""

from __future__ import annotations

import asyncio
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human

EXIT_CANNOT_WORK_TOGETHER = 1


def version(
    *,
    check: Annotated[
        str, typer.Option(help="HOST:PORT of a syncer, or a run folder: can this build join its run?")
    ] = "",
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Print the version of Atoll. With --check, also that of a syncer, and whether both speak a common protocol.

    Exit status 1 if they do not. Upgrade one process after the other: a release works together with the one before it.
    """
    print_version()
    if not check:
        return
    from atoll.launch import compare_builds, reach
    from atoll.wire import fetch_status

    there = reach(check, token=o.run_token(context, token, token_file), tls_ca=tls_ca, tls_name=tls_name)
    text, fits = compare_builds(asyncio.run(fetch_status(there.options)))
    human(json_wanted=False).print(f"syncer at {there.options.address}: {text}", markup=False, soft_wrap=True)
    if not fits:
        raise typer.Exit(EXIT_CANNOT_WORK_TOGETHER)


def print_version() -> None:
    print(version_of("atoll"))
