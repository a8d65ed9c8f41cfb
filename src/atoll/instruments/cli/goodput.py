"""`atoll sim goodput`: what failures, repairs and unequal speeds leave of a fleet's time."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.cli import EXIT_INTERRUPTED, human, print_json, save_text
from atoll.cli import options as o

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from atoll.instruments.fleet import Cell, Parts, Scavenged, Unequal
    from atoll.instruments.fleet import Table as Cells

_FLEET = "Fleet"
_TIMES = "Mechanics (seconds)"
_PARTS = "Coordinator, shards and relays"
_EFFORT = "Effort"
_UNITS = {"k": 1e3, "m": 1e6}
_NOTES_MAX = 8
"""Cells of which a note says how sure they are; the others are counted."""
_SAY_EVERY = 5
"""Finished cells between two lines of progress where there is no terminal for a bar: a row of the published table."""


def goodput(
    *,
    chips: Annotated[
        str, typer.Option(help="Chips in all, e.g. 150k or 1.2M; several with commas.", rich_help_panel=_FLEET)
    ] = "",
    learners: Annotated[
        str, typer.Option(help="Learners (M); several with commas (default 2,4,8,16).", rich_help_panel=_FLEET)
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help="inelastic, elastic (data-parallel), decoupled, diloco (synchronous); several with commas.",
            rich_help_panel=_FLEET,
        ),
    ] = "",
    mtbi_years: Annotated[
        float, typer.Option(help="Mean time between interruptions of one chip, in years.", rich_help_panel=_FLEET)
    ] = 1.0,
    heterogeneous: Annotated[
        bool, typer.Option("--heterogeneous", help="Eight learners of unequal speed instead.", rich_help_panel=_FLEET)
    ] = False,
    scavenging: Annotated[
        bool, typer.Option("--scavenging", help="Extra learners for half of a run instead.", rich_help_panel=_FLEET)
    ] = False,
    slice_chips: Annotated[
        int | None, typer.Option(help="Chips that fail and return together (default 256).", rich_help_panel=_TIMES)
    ] = None,
    step: Annotated[float | None, typer.Option(help="One inner step (default 2).", rich_help_panel=_TIMES)] = None,
    detect: Annotated[
        float | None, typer.Option(help="From a failure until it is known (default 10).", rich_help_panel=_TIMES)
    ] = None,
    shrink: Annotated[
        float | None,
        typer.Option(help="Unplanned resize without the failed slice (default 7).", rich_help_panel=_TIMES),
    ] = None,
    grow: Annotated[
        float | None, typer.Option(help="Planned resize with returned slices (default 18).", rich_help_panel=_TIMES)
    ] = None,
    hold_off: Annotated[
        float | None, typer.Option(help="Wait of returned slices for company (default 75).", rich_help_panel=_TIMES)
    ] = None,
    return_: Annotated[
        float | None,
        typer.Option("--return", help="Mean time until a failed slice is back (default 300).", rich_help_panel=_TIMES),
    ] = None,
    restart: Annotated[
        float | None, typer.Option(help="Mean time of a whole restart (default 90).", rich_help_panel=_TIMES)
    ] = None,
    restart_shape: Annotated[
        float | None, typer.Option(help="Weibull shape of the restart time (default 0.75).", rich_help_panel=_TIMES)
    ] = None,
    speed_spread: Annotated[
        float | None, typer.Option(help="Spread of learners' step times, e.g. 0.1 (default 0).", rich_help_panel=_FLEET)
    ] = None,
    shards: Annotated[
        int | None, typer.Option(help="Shards, each on a host of its own that fails.", rich_help_panel=_PARTS)
    ] = None,
    relays: Annotated[
        int | None, typer.Option(help="Relays, likewise; learners are shared out.", rich_help_panel=_PARTS)
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="Another coordinator takes over.", rich_help_panel=_PARTS)
    ] = False,
    part_mtbf_days: Annotated[
        float | None,
        typer.Option(help="Mean time between failures of the host of one part (default 30).", rich_help_panel=_PARTS),
    ] = None,
    part_restart: Annotated[
        float | None, typer.Option(help="Seconds until a part is back (default 60).", rich_help_panel=_PARTS)
    ] = None,
    takeover: Annotated[
        float | None, typer.Option(help="Seconds that a standby needs (default 20).", rich_help_panel=_PARTS)
    ] = None,
    precision: Annotated[
        float | None,
        typer.Option(help="Stop at this half of the 95% interval, in points (default 0.4).", rich_help_panel=_EFFORT),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Simulate so many seconds per cell (0: until precise).", rich_help_panel=_EFFORT)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Where the failures are drawn from.", rich_help_panel=_EFFORT)] = 0,
    jobs: Annotated[int, typer.Option(help="Processes (0: one per core).", rich_help_panel=_EFFORT)] = 0,
    figures: Annotated[Path | None, typer.Option(help="Write figures (PNG, HTML) to this folder.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write what was found to this file, as JSON.")] = None,
    json: o.Json = False,
) -> None:
    """Simulate the goodput of fleets whose chips fail, around the real protocol; by default the published table."""
    from atoll.errors import ConfigError
    from atoll.instruments.fleet import YEAR_S, Aim, Mechanics, simulate_scavenging, simulate_unequal

    console = human(json_wanted=json)
    given: dict[str, Any] = {
        "slice_chips": slice_chips,
        "step_s": step,
        "detect_s": detect,
        "shrink_s": shrink,
        "grow_s": grow,
        "hold_off_s": hold_off,
        "return_s": return_,
        "restart_s": restart,
        "restart_shape": restart_shape,
        "speed_spread": speed_spread,
    }
    mechanics = Mechanics(**{name: value for name, value in given.items() if value is not None})
    aim = Aim(seconds=seconds, seed=seed) if precision is None else Aim(precision, seconds, seed)
    answer: dict[str, Any] = {"cells": []}
    shown: list[Callable[[], None]] = []
    if heterogeneous or scavenging:
        cells_only = {"chips": chips, "learners": learners, "method": method, "precision": precision}
        others = {"mtbi-years": mtbi_years != 1.0, "seconds": seconds, "shards": shards, "relays": relays}
        others |= {"part-mtbf-days": part_mtbf_days, "part-restart": part_restart, "takeover": takeover}
        others["standby"] = standby
        _refuse_unused(cells_only | others | given, grows=scavenging)
    grid = _grid(chips, learners, method)
    parts = _parts_of(grid, shards, relays, part_mtbf_days, part_restart, takeover, standby=standby)
    _check_outputs(figures, save, grid)
    if not mtbi_years > 0.0:
        raise ConfigError(f"--mtbi-years must be above 0, not {mtbi_years:g}")
    if not (heterogeneous or scavenging):
        table = _simulate(grid, mechanics, mtbi_years * YEAR_S, aim=aim, jobs=jobs, parts=parts)
        shown.append(lambda: _print_cells(console, table))
        answer |= table.to_dict()
    if heterogeneous:
        unequal = simulate_unequal(mechanics=mechanics, seed=seed)
        shown.append(lambda: _print_unequal(console, unequal))
        answer["heterogeneous"] = [row.to_dict() for row in unequal]
    if scavenging:
        scavenged = simulate_scavenging(mechanics=mechanics, seed=seed)
        shown.append(lambda: _print_scavenged(console, scavenged))
        answer["scavenging"] = [row.to_dict() for row in scavenged]
    if save is not None:  # before anything is said: whoever listens may have gone
        save_text("--save", save, dumps(answer, indent=1) + "\n")
    for show in shown:
        show()
    if save is not None:
        console.print(f"saved: {save}", markup=False, soft_wrap=True)
    if json:
        print_json(answer)
    if figures is not None:
        _draw(console, figures, answer)


def _refuse_unused(given: dict[str, Any], *, grows: bool) -> None:
    """--heterogeneous and --scavenging have learners of their own and no failures: only the step's time matters, and
    with scavenging that of a planned resize."""
    from atoll.errors import ConfigError

    used = ("step_s", "grow_s") if grows else ("step_s",)
    unused = [name for name, value in given.items() if value not in (None, "", False, 0.0) and name not in used]
    if unused:
        names = ", ".join("--" + name.removesuffix("_s").replace("_", "-") for name in unused)
        raise ConfigError(
            f"--heterogeneous and --scavenging do not use {names}: they have learners of their own, and no failures; "
            "leave it away, or run it as a command of its own"
        )


def _check_outputs(figures: Path | None, save: Path | None, grid: list[tuple[int, int, str]] | None) -> None:
    """What would fail only after minutes of simulation."""
    from atoll.errors import ConfigError

    if figures is not None:
        if grid is not None and all(name == "diloco" for _, _, name in grid):
            raise ConfigError("the figures are of inelastic, elastic and decoupled; name one of them in --method too")
        from atoll.instruments.figures import require_matplotlib

        require_matplotlib()
        if figures.exists() and not figures.is_dir():
            raise ConfigError(f"--figures {figures} is not a folder; give one, or a name that is still free")
        try:
            figures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--figures {figures}: {error.strerror}; give a folder that can be written") from None
    if save is not None and (save.is_dir() or not save.parent.is_dir()):
        raise ConfigError(f"--save {save}: no such folder, or a folder itself; give a file in a folder that exists")


def _draw(console: Console, folder: Path, answer: dict[str, Any]) -> None:
    from atoll.instruments.cli.paper_figures import draw_goodput, draw_heterogeneous, draw_scavenging

    drawn = []
    if answer["cells"]:
        left_out = any(cell["method"] == "diloco" for cell in answer["cells"])
        drawn.append(f"{draw_goodput(folder, answer['cells'])}{' (without synchronous DiLoCo)' if left_out else ''}")
    if "heterogeneous" in answer:
        drawn.append(str(draw_heterogeneous(folder, answer["heterogeneous"])))
    if "scavenging" in answer:
        drawn.append(str(draw_scavenging(folder, answer["scavenging"])))
    for name in drawn:
        console.print(f"figures: {name}", markup=False, soft_wrap=True)


def _parts_of(
    grid: list[tuple[int, int, str]] | None,
    shards: int | None,
    relays: int | None,
    mtbf_days: float | None,
    restart_s: float | None,
    takeover_s: float | None,
    *,
    standby: bool,
) -> Parts | None:
    """What of the fabric fails; None: nothing was said of it."""
    from atoll.errors import ConfigError
    from atoll.instruments.fleet import DAY_S, Parts

    given: dict[str, Any] = {"shards": shards, "relays": relays, "restart_s": restart_s, "takeover_s": takeover_s}
    given["mtbf_s"] = mtbf_days * DAY_S if mtbf_days is not None else None
    said = {name: value for name, value in given.items() if value is not None}
    if not said and not standby:
        return None
    if takeover_s is not None and not standby:
        raise ConfigError("--takeover is what a standby needs; give --standby, or leave it away")
    if grid is not None and all(name in ("inelastic", "elastic") for _, _, name in grid):
        raise ConfigError("a data-parallel job has no coordinator, shards or relays; name decoupled or diloco")
    return Parts(standby=standby, **said)


def _simulate(
    grid: list[tuple[int, int, str]] | None,
    mechanics: Any,
    mtbi_s: float,
    *,
    aim: Any,
    jobs: int,
    parts: Parts | None = None,
) -> Cells:
    """All cells, with a bar that says how long it will still take; in a log, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from atoll.instruments.fleet import published_grid, simulate_table

    wanted = published_grid() if grid is None else grid
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("left"))
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("cells", total=len(wanted))
        finished: list[Cell] = []

        def done(cell: Cell) -> None:
            finished.append(cell)
            if not console.is_terminal and len(finished) % _SAY_EVERY == 0:
                last = f"{_name(cell)}, {_short(cell.chips)}: {cell.goodput:.1f}%"
                console.print(f"{len(finished)} of {len(wanted)} cells; last {last}", markup=False, soft_wrap=True)
            bar.update(task, advance=1, description=f"{_name(cell)}, {_short(cell.chips)}: {cell.goodput:.1f}%")

        try:
            return simulate_table(
                wanted, mechanics=mechanics, mtbi_s=mtbi_s, aim=aim, jobs=jobs, progress=done, parts=parts
            )
        except KeyboardInterrupt:
            console.print("interrupted; cells that were finished are not kept", style="yellow")
            raise typer.Exit(EXIT_INTERRUPTED) from None


def _grid(chips: str, learners: str, method: str) -> list[tuple[int, int, str]] | None:
    """The cells that were asked for: every number of chips with every method and, where it has any, every M."""
    from atoll.instruments.fleet import CHIPS

    if not (chips or learners or method):
        return None
    sizes = [_number("--chips", part) for part in _parts(chips)] or list(CHIPS)
    many = [_number("--learners", part) for part in _parts(learners)]
    methods = _parts(method) or (["decoupled"] if many else ["inelastic", "elastic", "decoupled"])
    together = ("inelastic", "elastic")  # data-parallel on all chips, beside whatever M the others have
    beside = any(name not in together for name in methods)
    rows = [
        (count, name)
        for name in methods
        for count in ([1] if name in together and (beside or not many) else many or [2, 4, 8, 16])
    ]
    return list(dict.fromkeys((size, count, name) for count, name in rows for size in sizes))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _number(option: str, text: str) -> int:
    """150000, 150k, 2.4M -> a whole number."""
    from atoll.errors import ConfigError

    unit = _UNITS.get(text[-1:].lower(), 1.0)
    try:
        value = float(text[:-1] if unit > 1.0 else text) * unit
        if value == round(value):
            return round(value)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{option} {text!r} is not a whole number; write 150000, 150k or 2.4M, several with commas")


def _short(chips: int) -> str:
    if chips % 100_000 == 0:
        return f"{chips / 1_000_000:g}M" if chips >= 1_000_000 else f"{chips // 1000}k"
    return f"{chips // 1000}k" if chips % 1000 == 0 else str(chips)


def _name(cell: Cell) -> str:
    """A row's name, short enough for five columns of three numbers on a narrow terminal."""
    words = {"inelastic": "inelastic", "elastic": "elastic", "diloco": f"DiLoCo {cell.learners}"}
    return words.get(cell.method, f"M={cell.learners}")


def _print_cells(console: Console, table: Cells) -> None:
    sizes = sorted({cell.chips for cell in table.cells})
    rows = list(dict.fromkeys(_name(cell) for cell in table.cells))
    found = {(_name(cell), cell.chips): cell for cell in table.cells}
    years = table.mtbi_s / 31_557_600.0
    title = f"goodput, % (ours, published, difference); one interruption per chip every {years:g} year(s)"
    _print_grid(console, title, rows, sizes, {key: _goodput_text(cell) for key, cell in found.items()})
    title = "uptime, % of time in which at least one learner steps"
    _print_grid(console, title, rows, sizes, {key: f"{cell.uptime:.2f}" for key, cell in found.items()})
    if table.parts is not None:
        title = "exchange, % of time in which a learner can exchange a fragment (simulated, on paper)"
        _print_grid(console, title, rows, sizes, {key: _exchange_text(cell) for key, cell in found.items()})
        console.print(_parts_text(table.parts), style="dim", soft_wrap=True)
    console.print("inelastic and elastic: data-parallel on all chips; M: learners, decoupled", style="dim")
    widest = max(cell.half_width for cell in table.cells)
    errors = table.errors
    if errors:
        console.print(
            f"published values: {len(errors)}; mean difference {sum(errors) / len(errors):.2f} points, "
            f"largest {max(errors):.2f}",
            soft_wrap=True,
        )
    events, simulated_s = sum(c.events for c in table.cells), sum(c.simulated_seconds for c in table.cells)
    console.print(
        f"95% intervals of at most ±{widest:.2f} points, from windows of one long run per cell; "
        f"{simulated_s / 86400:,.1f} simulated days, {events:,} events, {table.wall_seconds:.1f} s",
        style="dim",
        soft_wrap=True,
    )
    _print_doubts(console, table)


def _exchange_text(cell: Cell) -> str:
    return f"{cell.exchange:.3f} {cell.exchange_estimate:.3f}" if cell.method in ("decoupled", "diloco") else "-"


def _parts_text(parts: Parts) -> str:
    counts = f"coordinator{' with a standby' if parts.standby else ''}, {parts.shards} shards, {parts.relays} relays"
    away = f"{parts.coordinator_away_s:g}, {parts.restart_s:g} and {parts.relay_away_s:g} s"
    return f"{counts}; each host fails every {parts.mtbf_s / 86400:g} days, and they are away for {away}"


def _print_doubts(console: Console, table: Cells) -> None:
    """Cells that are less sure than they look: hardly a failure seen, or not as precise as was asked for."""
    doubtful = [(cell, text) for cell in table.cells if (text := _doubt(cell))]
    for cell, text in doubtful[:_NOTES_MAX]:
        console.print(f"{_name(cell)}, {_short(cell.chips)} chips: {text}", style="yellow", soft_wrap=True)
    if len(doubtful) > _NOTES_MAX:
        console.print(f"and {len(doubtful) - _NOTES_MAX} more such cells", style="yellow")


def _doubt(cell: Cell) -> str:
    from atoll.instruments.fleet import EVENTS_MAX

    parts = []
    if cell.few_failures:
        seen = {0: "no failure", 1: "only 1 failure"}.get(cell.failures, f"only {cell.failures} failures")
        parts.append(f"{seen} seen")
    if not cell.precise:
        limit = f"the limit of {EVENTS_MAX:,} events" if cell.events >= EVENTS_MAX else f"{cell.simulated_seconds:g} s"
        parts.append(f"±{cell.half_width:.2f} points after {limit}, wider than asked for")
    return f"{', '.join(parts)}; on paper {cell.estimate:.1f}%" if parts else ""


def _goodput_text(cell: Cell) -> str:
    if cell.difference is None or cell.published is None:
        paper = f" (on paper {cell.estimate:.1f})" if cell.few_failures or not cell.precise else ""
        return f"{cell.goodput:.1f} ±{cell.half_width:.1f}{paper}"
    colour = "green" if abs(cell.difference) <= 1.5 else "yellow" if abs(cell.difference) <= 3.0 else "red"
    return f"{cell.goodput:.1f} {cell.published:g} [{colour}]{cell.difference:+.1f}[/{colour}]"


def _print_grid(
    console: Console, title: str, rows: list[str], sizes: list[int], texts: dict[tuple[str, int], str]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print(title, style="bold", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, padding=(0, 0))
    table.add_column("chips", no_wrap=True)
    for size in sizes:
        table.add_column(_short(size), justify="right")
    for row in rows:
        table.add_row(row, *(texts.get((row, size), "-") for size in sizes))
    console.print(table)


def _print_unequal(console: Console, rows: list[Unequal]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print("eight learners, four of them 18% slower, speeds vary by 10%", style="bold", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD)
    for name in ("quorum", "variance drawn", "goodput, %", "published", "merged per commit"):
        table.add_column(name, justify="left" if name in ("quorum", "variance drawn") else "right")
    for row in rows:
        published = "-" if row.published is None else f"{row.published:g}"
        table.add_row(row.setting, row.variance, f"{row.goodput:.1f}", published, f"{row.contributors:.2f}")
    console.print(table)


def _print_scavenged(console: Console, rows: list[Scavenged]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console.print("four learners, extra ones for half of the tokens: time relative to none", style="bold")
    table = Table(box=SIMPLE_HEAD)
    for name in ("extra", "learners", "decoupled", "published", "perfect", "DP", "DP published"):
        table.add_column(name, justify="right")
    for row in rows:
        dp_published = "0.80 or 1.02" if row.data_parallel_published is None else f"{row.data_parallel_published:.2f}"
        table.add_row(
            f"+{row.extra_percent}%",
            str(row.learners_most),
            f"{row.decoupled:.3f}",
            f"{row.decoupled_published:.2f}",
            f"{row.perfect:.3f}",
            f"{row.data_parallel:.3f}",
            dp_published,
        )
    console.print(table)
