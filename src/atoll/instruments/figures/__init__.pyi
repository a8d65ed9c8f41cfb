from .bars import bars_figure
from .document import Section, page
from .goodput import collapse_figure, goodput_figure
from .growth import growth_figure
from .losses import loss_curves_figure
from .picture import Markup, PageTable, Picture
from .style import require_matplotlib
from .sweep import sweep_figure
from .utilisation import utilisation_figure

__all__ = [
    "Markup",
    "PageTable",
    "Picture",
    "Section",
    "bars_figure",
    "collapse_figure",
    "goodput_figure",
    "growth_figure",
    "loss_curves_figure",
    "page",
    "require_matplotlib",
    "sweep_figure",
    "utilisation_figure",
]
