"""Bad input: a ConfigError that says what is wrong and ends with what to do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from figure_samples import ONE_CELL, bars, cells, growth, runs, sweep, utilisation

from atoll.errors import ConfigError
from atoll.instruments import figures
from atoll.instruments.figures import Markup, PageTable, Section, page

NAN = float("nan")
EVERY: list[Callable[[Any], Any]] = [
    figures.goodput_figure,
    figures.collapse_figure,
    figures.growth_figure,
    figures.utilisation_figure,
    figures.loss_curves_figure,
    figures.bars_figure,
    figures.sweep_figure,
]


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize("data", [[], {}, "text", None, 5, [1], ["a"], [None]])
def test_nothing_or_something_else_instead_of_rows(make: Callable[[Any], Any], data: object) -> None:
    with pytest.raises(ConfigError, match=r"Give .+"):
        make(data)


BAD: list[tuple[Callable[[Any], Any], list[dict[str, Any]], str]] = [
    (figures.goodput_figure, [ONE_CELL | {"method": "magic"}], "unknown method 'magic'"),
    (figures.goodput_figure, [ONE_CELL | {"goodput": 101}], "between 0 and 100"),
    (figures.goodput_figure, [ONE_CELL | {"goodput": -1}], "between 0 and 100"),
    (figures.goodput_figure, [ONE_CELL | {"goodput": "98"}], "not a number"),
    (figures.goodput_figure, [ONE_CELL | {"goodput": True}], "not a number"),
    (figures.goodput_figure, [ONE_CELL | {"chips": 0}], "greater than zero"),
    (figures.goodput_figure, [ONE_CELL | {"chips": 1e30}], "Check its unit"),
    (figures.goodput_figure, [ONE_CELL | {"learners": 0.5}], "whole number"),
    (figures.goodput_figure, [ONE_CELL | {"learners": 10**6}], "at most the chips"),
    (figures.goodput_figure, [ONE_CELL, ONE_CELL], "second cell"),
    (figures.goodput_figure, [ONE_CELL | {"goodput": NAN}], "Nothing to draw: of 1 cells none"),
    (figures.goodput_figure, [ONE_CELL | {"learners": n} for n in range(1, 30)], "at most 24"),
    (figures.collapse_figure, [c for c in cells() if c["method"] == "inelastic"], "no elastic or decoupled cell"),
    (figures.growth_figure, [growth()[0] | {"events": -1}], "greater than zero"),
    (figures.growth_figure, [growth()[0] | {"wall_s": None}], "Nothing to draw"),
    (figures.utilisation_figure, [{"method": "a", "gbit_s": 0, "utilisation": 5}], "greater than zero"),
    (figures.utilisation_figure, [{"method": "", "gbit_s": 1, "utilisation": 5}], "a name needs 1 to 200"),
    (figures.utilisation_figure, [{"gbit_s": 1, "utilisation": 5}], "not a name"),
    (figures.utilisation_figure, utilisation(["a"], tuple("abcde")), "5 panels"),
    (figures.loss_curves_figure, [{"label": "a", "seed": 0}], "must be a list of points"),
    (figures.loss_curves_figure, [{"label": "a", "seed": 0, "curve": [[1, 2, 3]]}], "a list of 2 numbers"),
    (figures.loss_curves_figure, [{"label": "a", "seed": 0, "curve": ["ab"]}], "a list of 2 numbers"),
    (figures.loss_curves_figure, [{"label": "a", "seed": 0, "curve": []}], "no run has a point"),
    (figures.loss_curves_figure, [{"label": "a", "seed": 0, "curve": [[-5, 1.0]]}], "Check its unit"),
    (figures.loss_curves_figure, [*runs(["a"]), *runs(["a"])], "a second run of 'a' with seed 0"),
    (figures.loss_curves_figure, [runs(["a"])[0] | {"seed": 0.5}], "not a whole number"),
    (
        figures.loss_curves_figure,
        [{"label": "a", "seed": 0, "curve": [[0, 1]]}, {"label": "a", "seed": 1, "curve": [[9, 1]]}],
        "no range of tokens in common",
    ),
    (figures.loss_curves_figure, runs([str(i) for i in range(25)], seeds=1, points=2), "at most 24"),
    (figures.bars_figure, [{"label": "a", "percent": 1, "half_width": -1}], "between 0"),
    (figures.bars_figure, [{"label": "a", "percent": 1, "published": [1, 2, 3]}], r"\[low, high\]"),
    (figures.bars_figure, bars([str(i) for i in range(61)]), "at most 60"),
    (figures.bars_figure, [{"label": "x" * 201, "percent": 1}], "201 characters"),
    (figures.bars_figure, [{"label": "a\x00b", "percent": 1}], "cannot be printed"),
    (figures.sweep_figure, [*sweep(["a"]), *sweep(["a"])], "a second series named 'a'"),
    (figures.sweep_figure, [{"label": "a", "points": [[1]]}], "2 or 3 numbers"),
    (figures.sweep_figure, [{"label": "a", "points": [[NAN, 1]]}], "no series has a point"),
]


@pytest.mark.parametrize(("make", "data", "message"), BAD)
def test_wrong_values(make: Callable[[Any], Any], data: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(data)


def test_zero_on_a_logarithmic_axis() -> None:
    with pytest.raises(ConfigError, match="log_x=False"):
        figures.sweep_figure(sweep(["a"], (0, 1)), log_x=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    picture = figures.goodput_figure([ONE_CELL])
    with pytest.raises(ConfigError, match="Choose a folder"):
        picture.save(tmp_path / "file" / "name")
    with pytest.raises(ConfigError, match="names no file"):
        picture.save("")
    with pytest.raises(ConfigError, match="Choose a folder"):
        page(tmp_path / "file" / "index", "t", "i", [Section("s", ["text"])])


def test_pages_refuse_what_they_cannot_show(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no sections"):
        page(tmp_path / "index", "t", "i", [])
    with pytest.raises(ConfigError, match="cannot show a int"):
        page(tmp_path / "index", "t", "i", [Section("s", [5])])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="row 1 has 1 cells, not 2"):
        PageTable("t", ("a", "b"), [("1", "2"), ("3",)])
    assert not (tmp_path / "index.html").exists()


def test_unknown_names_and_what_is_public() -> None:
    assert all(getattr(figures, name) is not None for name in figures.__all__)
    with pytest.raises(AttributeError, match="attribute pie_figure"):
        _ = figures.pie_figure
    assert isinstance(Markup("x"), str)


def test_without_matplotlib_the_message_has_the_command_to_install_it() -> None:
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from atoll.errors import ConfigError\n"
        "from atoll.instruments.figures import Section, PageTable, goodput_figure, page\n"
        "try: goodput_figure([{'chips': 9, 'method': 'elastic', 'learners': 1, 'goodput': 5}])\n"
        "except ConfigError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60)
    assert "pip install 'atoll[figures]'" in done.stdout


def test_matplotlib_is_loaded_late_and_pyplot_never(tmp_path: Path) -> None:
    script = (
        "import sys, atoll.instruments.figures as f; assert 'matplotlib' not in sys.modules\n"
        "p = f.bars_figure([{'label': 'a', 'percent': 1}]); p.save(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "x")], check=True, timeout=60)
    assert (tmp_path / "x.png").exists()
