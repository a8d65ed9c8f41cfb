"""Pictures good enough for a paper, from plain data: PNG and HTML.

Each function takes lists of plain dicts and gives a `Picture`; `picture.save("folder/name")` writes folder/name.png and
returns a piece of HTML with the same drawing as inline SVG. `page` puts such pieces, texts and tables on one page that
needs nothing else. matplotlib is needed only when something is drawn: pip install 'atoll[figures]'.

goodput_figure(cells)        goodput against chips, a line per method and number of learners
collapse_figure(cells)       the same against chips per learner
growth_figure(points)        events and wall seconds of the simulator against chips
utilisation_figure(rows)     compute utilisation against bandwidth, a line per method
loss_curves_figure(runs)     loss against tokens, with the difference to the first label
bars_figure(groups)          relative loss against a baseline, with published bands
sweep_figure(series)         a result against a setting, a line per arm
timeline_figure(spans)       what each learner did over time
page(path, title, intro, sections)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.instruments.figures.bars import bars_figure
    from atoll.instruments.figures.document import Section, page
    from atoll.instruments.figures.goodput import collapse_figure, goodput_figure
    from atoll.instruments.figures.growth import growth_figure
    from atoll.instruments.figures.losses import loss_curves_figure
    from atoll.instruments.figures.picture import Markup, Picture, TextTable
    from atoll.instruments.figures.sweep import sweep_figure
    from atoll.instruments.figures.timeline import timeline_figure
    from atoll.instruments.figures.utilisation import utilisation_figure

_HOME = {
    "Markup": "picture",
    "Picture": "picture",
    "Section": "document",
    "TextTable": "picture",
    "bars_figure": "bars",
    "collapse_figure": "goodput",
    "goodput_figure": "goodput",
    "growth_figure": "growth",
    "loss_curves_figure": "losses",
    "page": "document",
    "sweep_figure": "sweep",
    "timeline_figure": "timeline",
    "utilisation_figure": "utilisation",
}

__all__ = [
    "Markup",
    "Picture",
    "Section",
    "TextTable",
    "bars_figure",
    "collapse_figure",
    "goodput_figure",
    "growth_figure",
    "loss_curves_figure",
    "page",
    "sweep_figure",
    "timeline_figure",
    "utilisation_figure",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
