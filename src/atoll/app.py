"""The `atoll` command: the product's commands and those of the instruments, put together. Nothing imports this room.

Each command loads its rooms when it runs. Errors end with a remedy instead of a traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import gc
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli import (
    dash,
    doctor,
    fabric,
    folder,
    keys,
    launch,
    logs,
    parts,
    run_script,
    shards,
    snapshot,
    status,
    takes,
    track,
    train,
    version,
)
from atoll.errors import AtollError
from atoll.instruments.cli import STORM, chaos, conform, demo, lab, plan, replay, sim
from atoll.plugins import load_entry_points
from atoll.preload import preload

if TYPE_CHECKING:
    from atoll.launch import FaultPlanner

app = typer.Typer(
    name="atoll",
    help="Train one model on many unreliable, unequal, far-apart machines that never wait for each other.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("train")(takes(STORM)(train.train))
app.command("run", context_settings={"allow_interspersed_args": False})(takes(STORM)(run_script.run_script))
app.command("resume")(folder.resume)
app.command("join")(folder.join)
app.command("leave")(folder.leave)
app.command("export")(folder.export)
app.command("snapshot")(snapshot.snapshot)
app.command("syncer")(parts.syncer)
app.command("shard")(fabric.shard)
app.add_typer(shards.shards, name="shards")
app.command("relay")(fabric.relay)
app.command("status")(status.status)
app.command("dash")(dash.dash)
app.command("track")(track.track)
app.command("logs")(logs.logs)
app.command("doctor")(doctor.doctor)
app.add_typer(keys.keys, name="keys")
app.add_typer(launch.launch, name="launch")
app.command("report")(parts.report)
app.add_typer(chaos.chaos, name="chaos")
app.command("replay")(replay.replay)
app.add_typer(conform.conform, name="conform")
app.add_typer(sim.sim, name="sim")
app.command("plan")(plan.plan)
app.add_typer(lab.lab, name="lab")
app.command("version")(version.version)


def _print_version(wanted: bool) -> None:
    if wanted:
        version.print_version()
        raise typer.Exit


def _storms() -> FaultPlanner:
    from atoll.instruments.storms import StormFaults

    return StormFaults()


@app.callback()
def atoll(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Train one model on many unreliable, unequal, far-apart machines that never wait for each other."""
    load_entry_points()
    context.obj = _storms


def main() -> None:
    """Entry point of the `atoll` script and of `python -m atoll`."""
    # A Python that has loaded PyTorch takes a second to end, nearly all of it in search of cycles among what nobody
    # will use again.
    atexit.register(gc.freeze)
    run()


def run() -> None:
    """Run the command line. Atoll's own errors become one message; ATOLL_DEBUG=1 shows where they came from."""
    try:
        try:
            preload(os.environ.get("ATOLL_PRELOAD", ""))
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # nobody reads any more: | head -1
        with contextlib.suppress(OSError):  # or Python would try to flush once more, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or os.environ.get("ATOLL_DEBUG"):
            raise
        from atoll.cli import print_error

        print_error(f"{error.strerror}: {error.filename or 'what is printed'}; make room and run it again")
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch" or os.environ.get("ATOLL_DEBUG"):
            raise
        from atoll.cli import EXIT_BAD_INPUT, print_error

        print_error("this command trains with PyTorch, which is not installed: pip install 'atoll[torch]'")
        sys.exit(EXIT_BAD_INPUT)
    except AtollError as error:
        if os.environ.get("ATOLL_DEBUG"):
            raise
        from atoll.cli import EXIT_BAD_INPUT, print_error

        print_error(str(error))
        sys.exit(EXIT_BAD_INPUT)
