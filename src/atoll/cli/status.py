"""`atoll status`: the live state of a run in people's words, from anywhere; and how a run ended that is over."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, print_json
from atoll.errors import LaunchError, UnreachableError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from atoll.launch import RunEnd

WATCH_S = 2.0
"""Between two looks of --watch: as often as a learner's heartbeat has something new to say."""


def status(
    address: Annotated[str, typer.Argument(help="HOST:PORT of the syncer, or the run folder of one on this machine.")],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 s, until Ctrl-C.")] = False,
    all: Annotated[bool, typer.Option("--all", help="Everything that the syncer tells.")] = False,
    json: o.Json = False,
    context: typer.Context,
) -> None:
    """Show how a run is doing: who trains, who is silent or behind, what went wrong, what is safe where."""

    found = o.run_token(context, token, token_file)

    def look() -> dict[str, Any] | RunEnd:
        return _look(address, token=found, tls_ca=tls_ca, tls_name=tls_name)

    if json:
        from dataclasses import asdict

        answer = look()
        print_json(answer if isinstance(answer, dict) else {"ended": True, **asdict(answer)})
    elif watch:
        _watch(look, title=address)
    else:
        _show(look(), title=address, everything=all)


def _look(target: str, *, token: str, tls_ca: str, tls_name: str) -> dict[str, Any] | RunEnd:
    """What the syncer says or, if it has ended in order, how."""
    from atoll.launch import how_it_ended, reach, run_folder_of
    from atoll.wire import fetch_status

    folder = run_folder_of(target)
    try:
        there = reach(target, token=token, tls_ca=tls_ca, tls_name=tls_name)
        answer = asyncio.run(fetch_status(there.options))
        if there.run and answer.get("run") != there.run:
            raise UnreachableError(f"at {there.options.address} there is another run's syncer now; start this one's")
        return answer
    except (UnreachableError, LaunchError) as error:
        ended = how_it_ended(folder) if folder is not None else None
        if ended is not None:
            return ended
        if folder is None or isinstance(error, LaunchError):
            raise
        again = f"`atoll resume {target}` goes on with it" if folder.config_file.exists() else "start it again there"
        text = f"the run in {target} has not ended, but its syncer does not answer: {error}"
        raise LaunchError(f"{text}; if it died, {again}") from None


def _show(answer: dict[str, Any] | RunEnd, *, title: str, everything: bool) -> None:
    from atoll.cli.status_view import ended_lines, status_view
    from atoll.cli.tables import print_tables

    console = human(json_wanted=False)
    if not isinstance(answer, dict):
        for line in ended_lines(answer, title, time.time()):
            console.print(line, markup=False, soft_wrap=True)
        return
    console.print(status_view(answer, time.time(), console.width))
    if everything:
        print_tables(answer, console=console, title=f"syncer {title}")
    else:
        console.print("--all shows the rest, --json gives all of it to a program", style="dim")


def _watch(look: Any, *, title: str) -> None:
    """Until Ctrl-C, or the end of the run. A syncer that is away for a moment is waited for."""
    from rich.live import Live
    from rich.text import Text

    from atoll.cli.status_view import status_view

    try:
        console = human(json_wanted=False)
        with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:

            def show(what: RenderableType) -> None:
                if live is not None:
                    live.update(what, refresh=True)
                else:  # into a file or a pipe: one view after the other
                    console.print(time.strftime("%H:%M:%S"), what, sep="\n")

            answer: dict[str, Any] | RunEnd | None = look()
            while answer is None or isinstance(answer, dict):
                if answer is not None:
                    show(status_view(answer, time.time(), console.width))
                time.sleep(WATCH_S)
                try:
                    answer = look()
                except (UnreachableError, LaunchError) as error:
                    answer = None  # what it said before is no news
                    show(Text(f"{error}; looking again ...", style="yellow"))
        _show(answer, title=title, everything=False)
    except KeyboardInterrupt:
        pass
