"""The one look of all figures: sizes, colours, type, and the frame of a plot.

matplotlib is used through its objects (Figure and Agg), never through pyplot, and its settings are ours only inside
`styled()`: the user's own neither change our pictures nor are changed by them. They are global to the process, so two
threads should not draw at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from atoll.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMN_INCHES = 3.4
"""Width of one column of a two-column paper (ICML, NeurIPS workshop and IEEE styles: 3.25 to 3.5)."""

PAGE_INCHES = 7.0
"""Width of the text block of a two-column paper."""

DPI = 300
"""What journals ask for in pictures with text."""

INK = "#1c2430"
SOFT = "#5b6673"
AXIS = "#8d97a3"
GRID = "#e7ebef"
BAND = "#dfe4ea"

PALETTE = ("#0069a8", "#d45500", "#00a07a", "#8e2f7f", "#c79400", "#5ab4ea", "#1c2430", "#8d97a3")
"""Okabe and Ito's hues, shifted so that any two differ by at least 10 in CIE Lab for the three kinds of colour
blindness (tests/figures/test_figures_style.py computes it). Markers and dashes differ as well."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.6)), (0, (1.6, 1.2)), (0, (6, 1.4, 1.4, 1.4)))

RAMP = ("#5ab4ea", "#0069a8", "#0a2c54")
"""Light to dark, for series that have an order, such as the number of learners: it reads in grey too."""

CONTRAST_MIN = 4.5
"""Contrast of coloured text on white that WCAG 2 (level AA) asks for."""

_SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # ships with matplotlib, so it is the same on every machine
    "font.size": 7.0,
    "axes.labelsize": 7.0,
    "axes.titlesize": 7.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 5.0,
    "axes.labelcolor": SOFT,
    "axes.labelpad": 3.0,
    "axes.edgecolor": AXIS,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "text.parse_math": False,  # a name such as "$PATH" is a name
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "xtick.color": AXIS,
    "ytick.color": AXIS,
    "xtick.labelcolor": SOFT,
    "ytick.labelcolor": SOFT,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.6,
    "lines.markeredgewidth": 0.8,
    "lines.solid_capstyle": "round",
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.handletextpad": 0.5,
    "legend.columnspacing": 1.4,
    "legend.labelspacing": 0.35,
    "legend.borderpad": 0.0,
    "legend.borderaxespad": 0.2,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # letters as outlines: the labels keep their size where DejaVu Sans is not installed
    "svg.hashsalt": "atoll",  # same data, same bytes
}


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "Figures need matplotlib, which is not installed. Install it with: pip install 'atoll[figures]'"
        ) from error


@contextmanager
def styled() -> Iterator[None]:
    """Inside, matplotlib has its defaults and our settings on top; outside, whatever the user chose."""
    require_matplotlib()
    import matplotlib

    backends = {"backend", "backend_fallback"}
    defaults = dict.items(matplotlib.rcParamsDefault)
    settings: dict[Any, Any] = {key: value for key, value in defaults if key not in backends}
    with matplotlib.rc_context(settings | _SETTINGS):
        yield


def new_figure(width: float, height: float, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches with panels side by side. Call it inside `styled()`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, round(height, 2)), dpi=DPI)
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.04, wspace=0.06)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for one in axes:
        one.grid(axis="y")
        one.locator_params(axis="y", nbins=7)
    return figure, axes


def width_of(wide: bool) -> float:
    return PAGE_INCHES if wide else COLUMN_INCHES


# ---------------------------------------------------------------- colours


def colour(index: int) -> str:
    return PALETTE[index % len(PALETTE)]


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the n-th unordered series: no two of the first 32 are alike in all three."""
    turn = index // len(PALETTE)
    return {
        "color": colour(index),
        "marker": MARKERS[(index + turn) % len(MARKERS)],
        "linestyle": DASHES[turn % len(DASHES)],
    }


def ramp(count: int) -> list[str]:
    """So many colours from light to dark."""
    from matplotlib.colors import LinearSegmentedColormap, to_hex

    if count == 1:
        return [RAMP[1]]
    scale = LinearSegmentedColormap.from_list("atoll", RAMP)
    return [to_hex(scale(i / (count - 1))) for i in range(count)]


def text_colour(line_colour: str) -> str:
    """The colour of a line, darkened until it can be read as text on white."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = to_rgb(line_colour)
    while _contrast((red, green, blue)) < CONTRAST_MIN:
        red, green, blue = red * 0.94, green * 0.94, blue * 0.94
    return to_hex((red, green, blue))


def _contrast(rgb: tuple[float, float, float]) -> float:
    """Against white, as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 1.05 / (luminance + 0.05)
