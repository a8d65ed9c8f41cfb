"""`atoll replay`: the merges of a recorded run made again, or two runs compared decision by decision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from atoll.cli import human, print_json
from atoll.cli import options as o
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from atoll.instruments.replay import Decision, Parting, ReplayReport, TapeDiff

Item = TypeVar("Item")
EXIT_DIFFERENT = 1
SHOWN_MAX = 8
"""Lines of one kind that are shown; --json has all of them."""


def replay(
    run_folder: Annotated[Path, typer.Argument(help="Folder of a run that was recorded (--record).")],
    *,
    until: Annotated[
        int | None, typer.Option(help="Stop after this round and export the parameters as they were then.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(help="File for the parameters, as safetensors (default with --until: NAME-round-N.safetensors)."),
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(help="Another run: show the first decision where the two part; no merge is made.")
    ] = None,
    json: o.Json = False,
) -> None:
    """Make every merge of a recorded run again and compare each version, to the bit. Exit status 1: something differs.

    The run may be over, killed or still going on; nothing in its folder is changed.
    """
    console = human(json_wanted=json)
    if diff is not None:
        if until is not None or export is not None:
            raise ConfigError("--diff compares two tapes and makes no merges; leave --until and --export away")
        _diff(run_folder, diff, console=console, json_wanted=json)
        return
    from atoll.instruments.replay import replay as replay_run

    if until is not None and export is None:
        export = Path(f"{run_folder.resolve().name}-round-{until}.safetensors")
    report = replay_run(run_folder, until, export=export)
    for line in describe_replay(report):
        console.print(line, markup=False, soft_wrap=True)
    if json:
        print_json(report.to_dict())
    if not report.identical:
        raise typer.Exit(EXIT_DIFFERENT)


def describe_replay(report: ReplayReport) -> list[str]:
    """What came of it, in lines."""
    lines = [f"note: {problem}" for problem in _some(report.problems)]
    upto = f" up to round {report.until}" if report.until is not None else ""
    lines.append(
        f"run {report.run}: {report.merges:,} merges of {report.contributions:,} contributions "
        f"({report.payload_bytes / 1e6:,.1f} MB) made again{upto}, {report.epochs} "
        f"epoch{'' if report.epochs == 1 else 's'}, {report.seconds:.2f} s"
    )
    if report.left_out:
        lines.append(f"left out, because they were recorded and never committed: {report.left_out}")
    for jump in _some(report.jumps):
        since = (
            f"continued at version {jump.version}" if jump.before >= 0 else f"followed from version {jump.version} on"
        )
        gap = (
            f", versions {jump.before + 1} to {jump.version} not made again" if 0 <= jump.before < jump.version else ""
        )
        lines.append(f"fragment {jump.fragment}: {since} from recorded parameters ({jump.why}{gap})")
    lines += [f"missing: {text}" for text in _some(report.missing)]
    if report.mismatch is not None:
        m = report.mismatch
        lines.append(
            f"DIFFERENT: fragment {m.fragment}, version {m.version}, round {m.round}: {m.what} has checksum "
            f"{m.expected:016x} in the run and {m.found:016x} here"
        )
    elif report.ends:
        versions = [end.found_version for end in report.ends]
        lines.append(f"{len(versions)} fragments at versions {min(versions)} to {max(versions)}")
        if report.hash_expected:
            same = "identical" if report.hash_expected == report.hash_found else f"the run's is {report.hash_expected}"
            lines.append(f"parameters {report.hash_found}: {same}")
        elif report.identical:
            lines.append(f"parameters {report.hash_found}; every version on the way is identical")
    if report.exported:
        lines.append(f"exported: {report.exported}")
    elif report.until is not None:
        lines.append("nothing was exported")
    return lines


def _diff(first: Path, second: Path, *, console: Console, json_wanted: bool) -> None:
    from atoll.instruments.replay import diff_tapes

    found = diff_tapes(first, second)
    for line in describe_diff(found):
        console.print(line, markup=False, soft_wrap=True)
    if json_wanted:
        print_json(found.to_dict())
    if not found.same:
        raise typer.Exit(EXIT_DIFFERENT)


def describe_diff(diff: TapeDiff) -> list[str]:
    """Where two tapes part, in lines."""
    lines = [f"note: {problem}" for problem in _some(diff.problems)]
    lines.append(f"A {diff.first}: {diff.decisions[0]:,} decisions; B {diff.second}: {diff.decisions[1]:,} decisions")
    if diff.overall is None:
        return [*lines, "the same decisions in the same order"]
    lines.append(f"the first {diff.overall.position:,} decisions are the same; then")
    lines += _both(diff.overall)
    if not diff.fragments:
        return [*lines, "every fragment has the same decisions; only the order between fragments differs"]
    lines.append("fragment by fragment:")
    for fragment, parting in _some(list(diff.fragments.items())):
        lines.append(f"  fragment {fragment}, after {parting.position:,} that are the same: {_short(parting)}")
    return lines


def _both(parting: Parting) -> list[str]:
    return [f"  A {_decision(parting.first)}", f"  B {_decision(parting.second)}"]


def _short(parting: Parting) -> str:
    if parting.first is None or parting.second is None:
        return "A has no more" if parting.first is None else "B has no more"
    return f"version {parting.first.version} differs in {', '.join(parting.fields)}"


def _decision(decision: Decision | None) -> str:
    if decision is None:
        return "has no more"
    parts = [
        f"{learner}.{generation}#{seq} x {weight:.6g}"
        for (learner, generation, seq), weight in zip(decision.contributions, decision.weights, strict=True)
    ]
    more = f" and {len(parts) - SHOWN_MAX} more" if len(parts) > SHOWN_MAX else ""
    return (
        f"round {decision.round}, fragment {decision.fragment} -> version {decision.version}, checksum "
        f"{decision.checksum:016x}: {', '.join(parts[:SHOWN_MAX])}{more}"
    )


def _some(items: Sequence[Item]) -> Sequence[Item]:
    return items[:SHOWN_MAX]
