"""`atoll lab`: real training of many learners on one device in virtual time; studies, and what comes of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED, human, print_json, save_text, sigterm_as_interrupt
from atoll.cli import options as o
from atoll.instruments.cli import lab_say as say
from atoll.zoo import OPTIMIZERS

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.instruments.cli.lab_processes import Chosen
    from atoll.instruments.lab import LabResult, LabSpec, Planned, Runner, StudyOutcome

EXIT_FAILED = 1
THREADS_MAX = 1024
"""More cores than any machine of today has for one process."""

lab = typer.Typer(
    help="Train real models by many learners on one device in virtual time, and compare methods.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COMPILES = ("auto", "yes", "no")
Compile = Annotated[str, typer.Option("--compile", help="Compile the step: auto (long runs on a GPU), yes or no.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")]
Threads = Annotated[int, typer.Option(help="CPU threads (0: as PyTorch chooses). On a busy machine 1 is fastest.")]
StoreFile = Annotated[
    Path | None, typer.Option("--store", help="JSONL file of results (default results.jsonl beside the study).")
]
Studies = Annotated[list[Path], typer.Argument(help="Study files (TOML); see docs/LAB.md.")]


@lab.command("run")
def run_command(
    *,
    method: Annotated[str, typer.Option(help="decoupled, streaming, diloco, dp or single.")] = "decoupled",
    model: Annotated[str, typer.Option(help="Size of the GPT: nano, tiny, small, medium, base.")] = "tiny",
    corpus: Annotated[str, typer.Option(help="What is read, as for atoll train.")] = "stdlib",
    learners: Annotated[int, typer.Option(help="How many train.")] = 4,
    batch: Annotated[int, typer.Option(help="Sequences of one step of all learners together.")] = 32,
    seq: Annotated[int, typer.Option(help="Bytes of a sequence.")] = 128,
    tokens: Annotated[int, typer.Option(help="Processed in total, by all learners.")] = 1_000_000,
    optimizer: Annotated[str, typer.Option(help=f"Inner optimizer: {', '.join(OPTIMIZERS)}.")] = OPTIMIZERS[0],
    lr: Annotated[float, typer.Option(help="Peak learning rate (0: the model's own).")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the model, the data and what a scenario draws.")] = 0,
    scenario: Annotated[Path | None, typer.Option(help="TOML file of speeds, links and faults.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting, such as sync_every=24; as often as you like.")
    ] = None,
    device: Device = "auto",
    compiles: Compile = "auto",
    threads: Threads = 0,
    store: Annotated[Path | None, typer.Option("--store", help="Append the result to this JSONL file.")] = None,
    json: o.Json = False,
) -> None:
    """Train once, and say how it went."""
    from atoll.instruments.lab import LabScenario, ResultStore, RunRecord, make_spec, read_toml

    console = human(json_wanted=json)
    values: dict[str, Any] = {
        "method": method,
        "model": model,
        "corpus": corpus,
        "learners": learners,
        "batch": batch,
        "seq": seq,
        "tokens": tokens,
        "optimizer": optimizer,
        "lr": lr,
        "seed": seed,
    }
    if scenario is not None:
        LabScenario.load(scenario)
        values["world"] = read_toml(scenario, "scenario")
    spec = make_spec(_with_settings(values, settings or []))
    results = ResultStore(store) if store is not None else None
    if results is not None:
        results.check()
    result = _run_one(spec, _runner(device, threads, compiles), console)
    if results is not None:  # before anything is said: whoever listens may have gone
        results.append(RunRecord.of(result, label=method))
    say.print_result(console, result)
    if json:
        print_json(result.to_dict())
    if results is not None:
        console.print(f"the result is in {results.path}", markup=False, soft_wrap=True)


@lab.command("study")
def study_command(
    studies: Studies,
    *,
    store: StoreFile = None,
    only: Annotated[list[str] | None, typer.Option(help="Only the arm with this label; as often as you like.")] = None,
    minutes: Annotated[float, typer.Option(help="Start no new run after so many minutes (0: no limit).")] = 0.0,
    processes: Annotated[int, typer.Option(help="So many runs at a time, each in a process of its own.")] = 1,
    failures: Annotated[Path | None, typer.Option(hidden=True, help="Where processes share what has failed.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="Only show the runs and which of them are done.")] = False,
    device: Device = "auto",
    compiles: Compile = "auto",
    threads: Threads = 0,
    json: o.Json = False,
) -> None:
    """Run what the store does not have yet. Stop it whenever you like: the same command goes on where it was."""
    from time import monotonic

    from atoll.instruments.cli.lab_processes import check_processes, study_together, words
    from atoll.instruments.lab import Forecast, ResultStore, StudyOutcome, check_minutes, conduct, load_study, pending

    console = human(json_wanted=json)
    check_minutes(minutes)
    check_processes(processes)
    loaded = [load_study(path) for path in studies]
    chosen = [(study, study.only(only or ()), ResultStore(store or study.store)) for study in loaded]
    if listing:
        for study, planned, results in chosen:
            say.print_list(console, study, planned, results)
        return
    if processes > 1:
        options = {"--store": store, "--only": only, "--minutes": minutes, "--device": device, "--compile": compiles}
        together = study_together(chosen, words(studies, options), processes, threads, console)
        if together.refused:
            raise typer.Exit(EXIT_BAD_INPUT)
        for (study, _, _), outcome in zip(chosen, together.outcomes, strict=True):
            say.print_outcome(console, study, outcome, some=bool(only))
        for text in together.broken:
            console.print(text, style="red", markup=False, soft_wrap=True)
        unfinished = together.broken and any(outcome.left for outcome in together.outcomes)
        raise typer.Exit(_study_end(chosen, together.outcomes, json_wanted=json) or (EXIT_FAILED if unfinished else 0))
    began_s, outcomes, runner = monotonic(), [], None
    for study, planned, results in chosen:
        known = results.records()
        queue = pending(planned, known)
        say.print_head(console, study, planned, len(queue), results.path)
        left = minutes - (monotonic() - began_s) / 60.0 if minutes else 0.0
        outcome = StudyOutcome(left=len(queue))
        if queue and left >= 0.0:
            runner = runner or _runner(device, threads, compiles)
            seen = _watched(console, queue, Forecast(known), tell_all=failures is None)
            with seen as watcher, sigterm_as_interrupt():
                outcome = conduct(
                    planned, results, runner, study=study.name, watcher=watcher, minutes=left, failures=failures
                )
        outcomes.append(outcome)
        say.print_outcome(console, study, outcome, some=bool(only))
        if outcome.interrupted:
            break
    raise typer.Exit(_study_end(chosen, outcomes, json_wanted=json))


@lab.command("report")
def report_command(
    studies: Studies,
    *,
    store: StoreFile = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this file.")] = None,
    figures: Annotated[Path | None, typer.Option(help="Draw figures and a page into this folder.")] = None,
    json: o.Json = False,
) -> None:
    """Tables and figures of what studies have found so far. Nothing is run."""
    from atoll.errors import ConfigError
    from atoll.instruments.lab import ResultStore, load_study, tables, worlds_table

    console = human(json_wanted=json)
    if store is not None and not store.is_file():
        raise ConfigError(f"--store {store}: there is no such file; give the store that the studies have written")
    loaded = [load_study(path) for path in studies]
    found = [(study, tables.table_of(study, ResultStore(store or study.store).records())) for study in loaded]
    worlds = [[made] if (made := worlds_table(study, lines)) is not None else [] for study, lines in found]
    if markdown is not None:
        texts = [tables.markdown(*one, *more) for one, more in zip(found, worlds, strict=True)]
        save_text("--markdown", markdown, "\n".join(texts))
    for (study, lines), more in zip(found, worlds, strict=True):
        for table in (tables.text_table(study, lines), *more):
            say.print_table(console, study, table)
        unknown, known = tables.unknown_facts(study, lines)
        if unknown:
            text = f"{study.name}: no run has {', '.join(unknown)}, which columns names; there are {', '.join(known)}"
            console.print(text, style="yellow", markup=False, soft_wrap=True)
    if markdown is not None:
        console.print(f"the tables are in {markdown}", markup=False, soft_wrap=True)
    if figures is not None:
        from atoll.instruments.cli.lab_figures import draw

        console.print(f"the figures are in {draw(figures, found)}", markup=False, soft_wrap=True)
    if json:
        print_json({"studies": [tables.to_dict(study, lines) for study, lines in found]})


# ---------------------------------------------------------------- running


def _runner(device: str, threads: int, compiles: str) -> Runner:
    """The engine, with a workshop that all runs share. Loads PyTorch."""
    from atoll.core import one_of
    from atoll.errors import ConfigError

    if not 0 <= threads <= THREADS_MAX:
        raise ConfigError(f"--threads must be from 0 to {THREADS_MAX}; not {threads}")
    try:
        import torch

        from atoll.instruments.lab import Workshop, run
    except ImportError as error:
        if error.name != "torch":
            raise
        raise ConfigError("the lab needs PyTorch: pip install 'atoll[torch]'") from None
    if threads:
        torch.set_num_threads(threads)
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # a task of the user's own lies there
    workshop = Workshop(
        device, compiles={"auto": None, "yes": True, "no": False}[one_of("--compile", compiles, COMPILES)]
    )

    def runner(spec: LabSpec, *, progress: Any = None) -> LabResult:
        return run(spec, progress=progress, keep=workshop)

    return runner


def _study_end(chosen: Chosen, outcomes: Sequence[StudyOutcome], *, json_wanted: bool) -> int:
    """The exit status of a study."""
    if json_wanted:
        print_json({"studies": [say.outcome_dict(s, x) for (s, _, _), x in zip(chosen, outcomes, strict=False)]})
    if any(outcome.interrupted for outcome in outcomes):
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(outcome.failed for outcome in outcomes) else 0


def _run_one(spec: LabSpec, runner: Runner, console: Console) -> LabResult:
    from atoll.instruments.lab import Forecast, Planned

    one = Planned(f"{spec.method} {spec.model if spec.task == 'gpt' else spec.task}", {}, spec)
    with _watched(console, [one], Forecast()) as watcher:
        watcher.began(one)
        try:
            return runner(spec, progress=watcher.progressed)
        except KeyboardInterrupt:
            console.print("interrupted; a single run keeps nothing (a study keeps what is finished)", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _watched(console: Console, queue: list[Planned], forecast: Any, *, tell_all: bool = True) -> Any:
    from atoll.instruments.cli.lab_progress import StudyProgress

    return StudyProgress(console, queue, forecast, tell_all=tell_all)


def _with_settings(values: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """`--set name=value`: of the synchronisation, or any other setting of a run."""
    from dataclasses import fields

    from atoll.core import SyncConfig, meant
    from atoll.errors import ConfigError
    from atoll.instruments.lab import LabSpec

    sync_names = {entry.name for entry in fields(SyncConfig)}
    own_names = {entry.name for entry in fields(LabSpec)} - {"sync", "world"}
    sync: dict[str, Any] = {}
    for text in settings:
        name, equals, value = text.partition("=")
        name = name.strip().removeprefix("sync.").replace("-", "_")
        if not equals or name not in sync_names | own_names:
            known = sorted(sync_names | own_names)
            raise ConfigError(f"--set {text[:60]}: {meant(name, known)}give NAME=VALUE with one of {', '.join(known)}")
        (sync if name in sync_names else values)[name] = _value(value.strip())
    return {**values, "sync": sync}


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
