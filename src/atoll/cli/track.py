"""`atoll track`: the curves of a run for TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import json as json_module
import time
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.terminal import human, sigterm_as_interrupt

LOOK_S = 2.0


def track(
    run_folder: Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_FOLDER")],
    *,
    to: Annotated[str, typer.Option(help="tensorboard[:FOLDER], wandb[:PROJECT] or mlflow[:EXPERIMENT].")],
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is over, or Ctrl-C.")] = False,
) -> None:
    """Hand the curves of a run to an experiment tracker, from its events: loss, speed, goodput, bytes, commits.

    The run does not notice. Start it beside a run (--follow), or after one.
    """
    from atoll.launch import run_folder_of
    from atoll.metrics import Tracker, make_writer

    found = run_folder_of(str(run_folder))
    path = found.path if found is not None else run_folder
    writer = make_writer(to, path.resolve().name, _settings(path))
    tracker = Tracker(path, writer)
    with sigterm_as_interrupt():
        try:
            tracker.poll()
            while follow and not tracker.over:
                time.sleep(LOOK_S)
                tracker.poll()
        except KeyboardInterrupt:
            pass
        finally:
            tracker.close()
    human(json_wanted=False).print(f"the curves of {path} are in {to}", markup=False, soft_wrap=True)


def _settings(path: Path) -> dict[str, object]:
    """The run's settings, flat: what trackers compare runs by."""
    try:
        told = json_module.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    pairs = {**told, **(told.get("sync") or {})} if isinstance(told, dict) else {}
    return {name: value for name, value in pairs.items() if isinstance(value, str | int | float | bool)}
