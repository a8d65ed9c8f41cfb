"""`atoll launch ENGINE JOB`: a job file on Slurm, Kubernetes, Ray or hosts with ssh; and the same verbs for each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from atoll.cli import options as o
from atoll.cli.terminal import human, print_json, warn

if TYPE_CHECKING:
    from atoll.engines import Engine, LaunchJob

VERBS = ("submit", "status", "scale", "stop", "logs")
EXIT_NOT_RUNNING = 1
ALIVE = ("waiting", "running")

JobFile = Annotated[Path, typer.Argument(help="The job file (TOML), such as examples/jobs/two-islands.toml.")]


class SubmitByDefault(TyperGroup):
    """`atoll launch slurm JOB` is `atoll launch slurm submit JOB`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((word for word in args if not word.startswith("-")), "")
        if first and first not in VERBS:
            args = ["submit", *args]
        return super().parse_args(ctx, args)


launch = typer.Typer(no_args_is_help=True, help="Run a job file on Slurm, Kubernetes, Ray, or hosts with ssh.")


def _add(engine: str, help: str) -> None:
    """The verbs of one engine: the same words everywhere."""
    group = typer.Typer(cls=SubmitByDefault, no_args_is_help=True, help=help)
    launch.add_typer(group, name=engine)

    @group.command("submit")
    def submit(
        job: JobFile,
        *,
        dry_run: Annotated[
            bool, typer.Option("--dry-run", help="Print what would be submitted; nothing is made or started.")
        ] = False,
    ) -> None:
        """Start the syncer and the islands of a job. The word submit may be left out."""
        from atoll.engines import ignored_by

        found, read = _engine(engine, job)
        for text in ignored_by(engine, read):
            warn(text)
        if dry_run:
            print(found.plan().rstrip("\n"))
            return
        found.submit()
        _say(f"job {read.name} is submitted; `atoll launch {engine} status {job}` shows it")

    @group.command("status")
    def status(job: JobFile, *, json: o.Json = False) -> None:
        """Show every process of a job: waiting, running, ended, failed or missing. Exit status 1 if none is alive."""
        found, _ = _engine(engine, job, json_wanted=json)
        states = found.status()
        width = max((len(one.name) for one in states), default=0)
        for one in states:
            text = f"{one.name:{width}}  {one.state:8} {one.where:16} {one.detail}".rstrip()
            human(json_wanted=json).print(text, markup=False, soft_wrap=True)
        if json:
            rows = [{"name": s.name, "state": s.state, "where": s.where, "detail": s.detail} for s in states]
            print_json({"processes": rows})
        if states and all(one.state == "missing" for one in states):
            told = f"{engine} knows nothing of this job; `atoll launch {engine} {job}` starts it"
            human(json_wanted=json).print(told, markup=False, soft_wrap=True)
        if not any(one.state in ALIVE for one in states):
            raise typer.Exit(EXIT_NOT_RUNNING)

    @group.command("scale")
    def scale(
        job: JobFile,
        islands: Annotated[list[str], typer.Argument(help="How many islands: NAME=COUNT; COUNT if all are of a kind.")],
    ) -> None:
        """Change how many islands run. Those beyond the number leave in order; the others train on."""
        from atoll.engines import parse_counts

        found, read = _engine(engine, job)
        counts = parse_counts(read, islands)
        found.scale(counts)
        _say("; ".join(f"{name}: {count} islands" for name, count in counts.items()))

    @group.command("stop")
    def stop(job: JobFile) -> None:
        """End a job: islands hand over and leave, the syncer writes the model, and nothing stays behind."""
        found, read = _engine(engine, job)
        alive = any(one.state in ALIVE for one in found.status())
        found.stop()
        _say(f"job {read.name} is stopped" if alive else f"nothing of job {read.name} was running; all is swept")

    @group.command("logs")
    def logs(
        job: JobFile,
        *,
        island: Annotated[str, typer.Option(help="Which process: east-0, syncer (default the syncer).")] = "syncer",
        lines: Annotated[int, typer.Option(min=1, help="How many of the last lines.")] = 200,
    ) -> None:
        """Print the end of what one process has printed."""
        print(_engine(engine, job)[0].logs(island, lines))


def _engine(name: str, path: Path, *, json_wanted: bool = False) -> tuple[Engine, LaunchJob]:
    from atoll.engines import engine_of, read_job

    job = read_job(path)
    console = human(json_wanted=json_wanted)
    return engine_of(name, job, lambda text: console.print(text, markup=False, soft_wrap=True)), job


def _say(text: str) -> None:
    human(json_wanted=False).print(text, markup=False, soft_wrap=True)


_add("slurm", "On Slurm: a batch job for the syncer, an array for each kind of islands.")
_add("k8s", "On Kubernetes: manifests for kubectl.")
_add("ray", "On a Ray cluster: actors in placement groups.")
_add("ssh", "On hosts that you reach with ssh.")
