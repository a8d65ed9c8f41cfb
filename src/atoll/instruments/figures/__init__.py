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
page(path, title, intro, sections)
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
