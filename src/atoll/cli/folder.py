"""What one does with a run folder from another terminal, or later: resume, join, leave, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from atoll.cli import options as o
from atoll.cli.terminal import human, print_json, write_raw, write_raw_aside

RunFolderArgument = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN_FOLDER")]
EXIT_LEARNERS_FAILED = 1


def resume(run_folder: RunFolderArgument, *, json: o.Json = False, context: typer.Context) -> None:
    """Go on with a run that was interrupted (Ctrl-C, a reboot, a crash), in its folder and from its last commit."""
    from atoll.cli.run_script import finish_script
    from atoll.cli.train import finish_train
    from atoll.launch import StoredRun, TrainConfig, describe, resume_run

    console = human(json_wanted=json)

    def tell(stored: StoredRun) -> None:
        for line in describe(stored.config):
            console.print(line, style="dim", markup=False, soft_wrap=True)

    from atoll.dash import LiveView

    stored, finished = resume_run(
        run_folder,
        view=lambda folder: LiveView(folder, console=console),
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
        say_raw=write_raw_aside if json else write_raw,
        tell=tell,
        faults=o.faults_of(context),
    )
    finish = finish_train if isinstance(stored.config, TrainConfig) else finish_script
    finish(finished, console=console, json_wanted=json)


def join(
    run_folder: RunFolderArgument,
    *,
    learners: Annotated[int, typer.Option(help="How many learners to add.")] = 1,
    id: Annotated[str, typer.Option(help="Id of the one learner that is added (default the next learner-N).")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads per learner; 0: as the run's own (default 0).")] = 0,
) -> None:
    """Add learners to a run that is going on here, until it ends; Ctrl-C or SIGTERM makes them leave, and it goes on.

    From another machine, set ATOLL_SYNCER=HOST:PORT, ATOLL_TOKEN_FILE, ATOLL_TLS_CA and ATOLL_LEARNER=NAME, and start
    your script: that is all that joining is.
    """
    from atoll.launch import join_run

    console = human(json_wanted=True)
    outcome, ids = join_run(
        run_folder,
        learners=learners,
        id=id,
        threads=threads,
        say=lambda text: console.print(text, markup=False, soft_wrap=True),
        say_raw=write_raw,
    )
    if outcome.given_up:
        console.print(f"{', '.join(outcome.given_up)} failed; see {run_folder}/logs", style="red", markup=False)
        raise typer.Exit(EXIT_LEARNERS_FAILED)
    went_on = "; the run goes on" if outcome.interrupted else ""
    ended = "left" if outcome.interrupted else "finished with the run"
    console.print(f"{', '.join(ids)} {ended}{went_on}", markup=False, soft_wrap=True)


def leave(
    target: Annotated[str, typer.Argument(help="Folder of a run on this machine, or HOST:PORT of the syncer.")],
    learner: Annotated[str, typer.Argument(help="Id of the learner, such as learner-2.")],
    *,
    token: o.Token = "",
    token_file: o.TokenFile = "",
    tls_ca: o.TlsCa = "",
    tls_name: o.TlsName = "",
    context: typer.Context,
) -> None:
    """Ask one learner to leave, wherever it runs: it hands over its progress and ends; the others go on without it.

    Its process ends with status 0, as after SIGTERM; a script that handles SIGTERM itself finds `learner.done` true.
    Exit status 4, here and there, if it could not hand over everything in time.
    """
    from atoll.launch import learners_here, leave_from_afar, leave_run, not_handed_over, reach, run_folder_of
    from atoll.learner import EXIT_NOT_HANDED_OVER

    console = human(json_wanted=False)
    found = o.run_token(context, token, token_file)
    folder = run_folder_of(target)
    text = f"{learner} is asked to leave; it finishes its step and hands over, for 3 minutes at most on a thin link ..."
    console.print(text, markup=False, soft_wrap=True)
    handed_over = True
    if folder is not None and (learner in learners_here(folder) or not folder.syncer_file.exists()):
        how = f"(pid {leave_run(folder.path, learner).pid}) has left"
        tokens = not_handed_over(folder.path, learner)
        how += f" without handing over {tokens:,} tokens; its log says why" if tokens else ""
        handed_over = not tokens
    else:
        how, handed_over = leave_from_afar(
            reach(target, token=found, tls_ca=tls_ca, tls_name=tls_name).options, learner
        )
    console.print(f"{learner} {how}", markup=False, soft_wrap=True)
    if not handed_over:
        raise typer.Exit(EXIT_NOT_HANDED_OVER)


@o.takes(o.KEEPING, only=("snapshot_options",))
def export(
    source: Annotated[
        str, typer.Argument(help="Folder of a run, or the folder or URL of a snapshot or of a run's snapshots.")
    ],
    *,
    to: Annotated[Path, typer.Option(help="File to write, such as model.safetensors.")],
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16, float16, or own: as in the training script (default float32).")
    ] = "float32",
    buffers: Annotated[
        str,
        typer.Option(
            help="Also what learners keep of their own (BatchNorm statistics): a learner's id, or mean.",
            metavar="ID|mean",
        ),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there already.")] = False,
    json: o.Json = False,
    context: typer.Context,
    **named: Any,
) -> None:
    """Write the published model of a run as safetensors, from its state or a snapshot; nothing of it need be alive.

    In PyTorch: atoll.load_model(path, model)
    """
    from dataclasses import asdict

    from atoll.launch import export_run, parse_options

    console = human(json_wanted=json)
    options = parse_options(o.snapshot_options(context, named["snapshot_options"] or ""))
    done = export_run(source, to, dtype=dtype, options=options, buffers=buffers, force=force)
    for problem in done.problems:
        console.print(f"note: {problem}", style="yellow", markup=False, soft_wrap=True)
    low, high = min(done.versions), max(done.versions)
    versions = f"version {low}" if low == high else f"versions {low} to {high}"
    fragments = f"{len(done.versions)} fragment{'' if len(done.versions) == 1 else 's'}"
    console.print(
        f"{done.to}: {done.tensors} tensors{f' ({done.buffers} buffers)' if buffers else ''}, {done.parameters:,} "
        f"parameters as {dtype}, {versions} of {fragments}, "
        f"from {done.source}",
        markup=False,
        soft_wrap=True,
    )
    if json:
        print_json({**asdict(done), "to": str(done.to)})
