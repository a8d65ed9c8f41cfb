"""`atoll logs`: what happened in a run, one line each, or what one of its processes printed."""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import options as o
from atoll.errors import ConfigError, LaunchError

if TYPE_CHECKING:
    from atoll.launch import RunFolder

LEVELS = ("info", "warning")
LOOK_S = 0.5
READ_BYTES = 1 << 16
OF_TONE = {"bad": "warning"}


def logs(
    run_folder: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_FOLDER")],
    *,
    learner: Annotated[str, typer.Option(help="What this learner (or: syncer) printed, instead.")] = "",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over, or Ctrl-C.")] = False,
    level: Annotated[str, typer.Option(help="info, or warning: only what a person should look at.")] = "info",
    log_format: o.LogFormat = "text",
) -> None:
    """Print what happened in a run, one line each, from its events; or with --learner what that process printed.

    Lines are `time level text`, or with --log-format json one object each.
    """
    from atoll.launch import run_folder_of

    if level not in LEVELS or log_format not in o.LOG_FORMATS:
        raise ConfigError(f"--level is one of {', '.join(LEVELS)}, --log-format one of {', '.join(o.LOG_FORMATS)}")
    folder = run_folder_of(str(run_folder))
    if folder is None:
        raise LaunchError(f"{run_folder} is no run folder; give the folder that the run named, such as runs/...")
    lines = _printed(folder, learner, follow=follow) if learner else _happened(folder, level, follow=follow)
    try:
        for line in lines:
            text = json.dumps(line) if log_format == "json" else _text(line)
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
    except KeyboardInterrupt:
        pass


def _text(line: dict[str, Any]) -> str:
    return f"{line['time']}  {line['level']:7}  {line['text']}" if "time" in line else str(line["text"])


def _happened(folder: RunFolder, level: str, *, follow: bool) -> Iterator[dict[str, Any]]:
    """Every line of the run's log, as the live view says them."""
    from atoll.observe import RunState, Tail

    tail, state, said = Tail(folder.path), RunState(), 0
    while True:
        for t_ns, source, event in tail.poll():
            state.apply(t_ns, event, source)
            new = state.log_count - said
            said = state.log_count
            for line in list(state.log)[len(state.log) - new :] if new else ():
                name = OF_TONE.get(line.tone, "info")
                if level == "info" or name == level:
                    yield {"time": _stamp(line.t_ns), "level": name, "text": line.text}
        if not follow or state.finished is not None:
            return
        time.sleep(LOOK_S)


def _printed(folder: RunFolder, learner: str, *, follow: bool) -> Iterator[dict[str, Any]]:
    from atoll.launch import is_finished

    log = folder.log_of(learner)
    if log is None:
        known = f"it has those of {', '.join(folder.logged())}" if folder.logged() else "it has none"
        raise LaunchError(f"{folder.path} holds no log of {learner!r}: {known}; learners of other machines log there")
    held = b""
    with log.open("rb") as file:
        while True:
            if log.stat().st_size < file.tell():
                file.seek(0)  # it was begun anew
            over = not follow or is_finished(folder)  # asked before the last read, so that nothing is left out
            while chunk := file.read(READ_BYTES):
                *lines, held = (held + chunk).split(b"\n")
                yield from ({"source": learner, "text": line.decode(errors="replace")} for line in lines)
            if over:
                break
            time.sleep(LOOK_S)
    if held:
        yield {"source": learner, "text": held.decode(errors="replace")}


def _stamp(t_ns: int) -> str:
    moment = datetime.datetime.fromtimestamp(t_ns / 1e9, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
