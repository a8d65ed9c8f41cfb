"""`atoll dash`: the live page of a run, in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human


def dash(
    target: Annotated[
        str,
        typer.Argument(
            help="Run folder, a folder with several runs, or HOST:PORT of a syncer.", metavar="RUN_FOLDER|HOST:PORT"
        ),
    ],
    *,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the page; port 0: any free one.")] = "127.0.0.1:8787",
    control: Annotated[
        bool,
        typer.Option(
            "--control",
            help="Let whoever has the page's token drain, add and kill learners, take a snapshot, and stop.",
        ),
    ] = False,
    page_token_file: o.PageTokenFile = "",
    tls_certificate: Annotated[str, typer.Option(help="Certificate file (PEM) of the page.")] = "",
    tls_key: Annotated[str, typer.Option(help="Key file (PEM) of that certificate.")] = "",
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Show a run in a browser, while it goes on or after it is over; several runs of one folder side by side.

    The page listens on this machine only, unless --listen says otherwise: then it needs a token and TLS. It only shows,
    unless --control. Ctrl-C ends it; the run does not notice.
    """
    from atoll.launch import reach
    from atoll.page import PageOptions, serve_page

    found, path = o.run_token(context, token, token_file), Path(target).expanduser()
    told = bool(found or tls_ca) and (path / "syncer.json").exists()  # else the folder knows how to reach its syncer
    by_hand = told or not path.is_dir()
    syncer = reach(target, token=found, tls_ca=tls_ca, tls_name=tls_name).options if by_hand else None
    options = PageOptions(
        listen=listen,
        token=o.page_token(page_token_file),
        control=control,
        tls_certificate=tls_certificate,
        tls_key=tls_key,
        syncer=syncer,
    )
    page = serve_page(target, options)
    human(json_wanted=False).print(f"live page: {page.address_with_token}", markup=False, soft_wrap=True)
    page.run()
