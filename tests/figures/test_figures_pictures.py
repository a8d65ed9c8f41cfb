"""All figures: what is on disk, what is in the HTML, and that no label is cut off or lies on another."""

from __future__ import annotations

from pathlib import Path

import pytest
from figure_checks import Page, check_layout, png_size, svg_of, titles_of
from figure_samples import HARD, NAMES, PLAIN, cells, runs, sweep, utilisation

from atoll.instruments import figures
from atoll.instruments.figures import Picture


@pytest.fixture(scope="module")
def plain() -> dict[str, Picture]:
    return {name: make() for name, make in PLAIN.items()}


@pytest.mark.parametrize("name", PLAIN)
def test_the_layout_of_plain_data(plain: dict[str, Picture], name: str) -> None:
    check_layout(plain[name])


@pytest.mark.parametrize("name", HARD)
def test_the_layout_of_hard_data(name: str) -> None:
    check_layout(HARD[name]())


@pytest.mark.parametrize("name", PLAIN)
def test_png_and_html(plain: dict[str, Picture], name: str, tmp_path: Path) -> None:
    picture = plain[name]
    html = picture.save(tmp_path / "made" / name)
    width, height = picture.figure.get_size_inches()
    made = png_size(tmp_path / "made" / f"{name}.png")
    assert made[0] == round(width * 300) and abs(made[1] - height * 300) <= 1.01  # matplotlib 3.8 cuts 758.99 to 758
    assert round(width, 2) in (3.4, 7.0)
    page = Page(html)
    assert page.count["svg"] == 1 and page.count["figcaption"] == 1
    assert len(page.ids) == len(set(page.ids)), "an id twice"
    assert all(reference.removeprefix("#") in page.ids for reference in page.references), "points at nothing inside"
    assert svg_of(html).get("aria-label") == picture.title
    assert len(titles_of(html)) == len(picture.tips) > 0, "a series is not in the drawing"


def test_the_same_data_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (PLAIN["losses"]().save(tmp_path / name) for name in ("a", "b"))
    assert first == second
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_goodput_shows_ours_and_the_published(plain: dict[str, Picture]) -> None:
    html = plain["goodput"].html()
    assert "M = 8: 150k chips 97.5 ± 0.4, 300k chips 95.5 ± 0.4" in " ".join(titles_of(html))
    ids = Page(html).ids
    assert sum(one.endswith("goodput-m-8-published") for one in ids) == 1
    assert ("M = 8", "2.4M", "79.5 ± 0.4", "80", "−0.5", "99.0") in plain["goodput"].table.rows
    bare = figures.goodput_figure(cells(published=None, half_width=None))
    assert not any("published" in one for one in Page(bare.html()).ids)
    assert "intervals" in plain["goodput"].full_caption and "intervals" not in bare.full_caption


def test_the_drawn_points_are_the_data(plain: dict[str, Picture]) -> None:
    (axes,) = plain["goodput"].figure.axes
    drawn = {line.get_gid(): line for line in axes.lines if line.get_gid()}
    assert list(drawn["goodput-m-1-inelastic"].get_ydata()) == [71.5, 56.5, 37.5, 26.5, 17.5]
    assert list(drawn["goodput-m-1-inelastic-published"].get_ydata()) == [72, 57, 38, 27, 18]
    assert list(drawn["goodput-m-16"].get_xdata()) == [150_000, 300_000, 600_000, 1_200_000, 2_400_000]


def test_collapse_divides_by_learners_and_states_how_well_the_rule_holds(plain: dict[str, Picture]) -> None:
    picture = plain["collapse"]
    lines = {line.get_gid(): list(line.get_xdata()) for line in picture.figure.axes[0].lines if line.get_gid()}
    assert lines["goodput-m-16"][0] == 150_000 / 16 and "goodput-m-1-inelastic" not in lines
    # The published table (FIGURES.md, section 1) has 10 comparable cells, the largest difference is 4 points.
    assert "10 decoupled cells have an elastic twin at N/M chips" in picture.full_caption
    assert "differ from it by −4.0 to +4.0 points" in picture.full_caption


def test_growth_states_the_exponents(plain: dict[str, Picture]) -> None:
    assert "events grow with exponent 0.80 and wall time with 0.70" in plain["growth"].full_caption


def test_utilisation_compares_with_the_published_by_interpolation() -> None:
    rows = [
        {"method": "DiLoCo", "gbit_s": 1.0, "utilisation": 40.0},
        {"method": "DiLoCo", "gbit_s": 100.0, "utilisation": 80.0},
        {"method": "DiLoCo", "gbit_s": 10.0, "published": 50.0},
        {"method": "DiLoCo", "gbit_s": 500.0, "published": 95.0},
    ]
    table = figures.utilisation_figure(rows).table
    assert table.rows == [("DiLoCo", "10", "60.0", "50", "+10.0"), ("DiLoCo", "500", "–", "95", "–")]
    many = figures.utilisation_figure(utilisation(["a", "b"], ("1B", "10B")))
    assert len(many.figure.axes) == 2 and many.table.head[0] == "setting"


def test_loss_difference_is_seed_by_seed() -> None:
    base = [{"label": "base", "seed": s, "curve": [[0, 4.0], [10, 1.0 + s]]} for s in (0, 1)]
    arm = [{"label": "arm", "seed": s, "curve": [[0, 4.0], [10, 1.1 * (1.0 + s)]]} for s in (0, 1)]
    picture = figures.loss_curves_figure([*base, *arm])
    lines = {line.get_gid(): list(line.get_ydata()) for line in picture.figure.axes[1].lines if line.get_gid()}
    assert lines["loss-arm-difference"] == pytest.approx([0.0, 10.0])
    assert picture.table.rows[1] == ("arm", "2", "10", "1.6500", "1.1000 to 2.2000", "+10.00")
    assert "means of 2 seeds" in picture.full_caption


def test_seeds_on_other_grids_are_interpolated_over_what_they_share() -> None:
    curves = [[[0, 2.0], [10, 1.0]], [[0, 2.0], [5, 1.5], [8, 1.2]]]
    picture = figures.loss_curves_figure([{"label": "a", "seed": i, "curve": c} for i, c in enumerate(curves)])
    (line,) = [one for one in picture.figure.axes[0].lines if one.get_gid() == "loss-a"]
    assert list(line.get_xdata()) == [0, 5, 8] and list(line.get_ydata()) == pytest.approx([2.0, 1.5, 1.2])


def test_high_first_losses_are_named_when_they_lie_above_the_axis(plain: dict[str, Picture]) -> None:
    assert plain["losses"].figure.axes[0].get_ylim()[1] < 4
    assert "The first losses, up to 4.8" in plain["losses"].full_caption
    flat = figures.loss_curves_figure([{"label": "a", "seed": 0, "curve": [[0, 1.0], [5, 0.99], [9, 0.98]]}])
    assert "above the axis" not in flat.full_caption


def test_bars_are_as_long_as_their_values_and_bands_as_published(plain: dict[str, Picture]) -> None:
    (axes,) = plain["bars"].figure.axes
    patches = {one.get_gid(): one for one in axes.patches}
    assert patches["bar-adamw-m-4"].get_width() == pytest.approx(0.7)
    band = patches["bar-adamw-m-4-published"]
    assert (band.get_x(), band.get_width()) == pytest.approx((1.0, 1.5))
    assert patches["bar-muon-m-1-published"].get_width() == pytest.approx(0.7)
    written = [text.get_text() for text in axes.texts]
    assert "+1.7 ± 0.6" in written and "(+1.0 to +2.5)" in written and "(−0.1)" in written


def test_sweep_keeps_points_in_order_of_the_setting() -> None:
    picture = figures.sweep_figure([{"label": "a", "points": [[24, 3, 0.1], [1, 1, None], [8, 2, 0.2]]}])
    line = next(one for one in picture.figure.axes[0].lines if one.get_gid() == "sweep-a")
    assert list(line.get_xdata()) == [1, 8, 24] and list(line.get_ydata()) == [1, 2, 3]
    assert picture.table.rows == [("a", "1", "1", "–"), ("a", "8", "2", "0.2"), ("a", "24", "3", "0.1")]


@pytest.mark.parametrize(
    ("picture", "note"),
    [
        (lambda: figures.goodput_figure([*cells(), cells()[0] | {"goodput": float("nan")}]), "1 of 31 cells is"),
        (lambda: figures.utilisation_figure([*utilisation(["a"]), {"method": "a"}]), "1 of 16 rows is not drawn"),
        (
            lambda: figures.loss_curves_figure([{"label": "a", "curve": [[0, 1], [1, float("inf")], [None, 2]]}]),
            "2 of 3 points are not drawn",
        ),
        (lambda: figures.bars_figure([{"label": "a", "percent": None}, {"label": "b", "percent": 1}]), "1 of 2 bars"),
        (lambda: figures.sweep_figure([*sweep(["a"]), {"label": "b", "points": [[1, None]]}]), "1 of 5 points is"),
    ],
)  # fmt: skip
def test_what_is_missing_is_dropped_and_the_caption_says_so(picture: object, note: str) -> None:
    made = picture()  # type: ignore[operator]
    assert note in made.full_caption
    assert note in made.html()
    check_layout(made)


def test_names_are_escaped_and_never_taken_for_formulas_or_markup(tmp_path: Path) -> None:
    evil = '<script>alert("$x^2$")</script> & more'
    picture = figures.sweep_figure(sweep([evil, "$unbalanced"]), caption="<b>bold</b>")
    html = picture.save(tmp_path / "evil")
    assert "<script" not in html and "&lt;b&gt;bold" in html and "script" not in Page(html).count
    assert evil in picture.table.rows[0]
    assert "<script" not in picture.table.html()
    assert any(evil in title for title in titles_of(html))


def test_labels_that_differ_only_in_signs_keep_their_own_series() -> None:
    picture = figures.sweep_figure(sweep(["a+b", "a-b", "+"]))
    assert len(titles_of(picture.html())) == 3


def test_a_full_name_is_never_lost() -> None:
    picture = figures.loss_curves_figure(runs(NAMES))
    written = " ".join(text.get_text() for legend in picture.figure.legends for text in legend.get_texts())
    assert all(name in " ".join(written.split()) for name in NAMES)
