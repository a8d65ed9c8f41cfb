"""`atoll snapshot`: an operator has the syncer write the whole run down, now."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human


def snapshot(
    target: Annotated[str, typer.Argument(help="HOST:PORT of the syncer, or the run folder of one on this machine.")],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Have the syncer write a snapshot of the whole run now, beside those that it makes by itself (--snapshots).

    A run without --snapshots has it in RUN_FOLDER/snapshots. Where learners have keys, this takes an operator's.
    """
    from atoll.launch import reach
    from atoll.wire import take_snapshot

    shown = o.run_token(context, token, token_file)
    there = reach(target, token=shown, tls_ca=tls_ca, tls_name=tls_name)
    said = asyncio.run(take_snapshot(there.options))
    human(json_wanted=False).print(said, markup=False, soft_wrap=True)
