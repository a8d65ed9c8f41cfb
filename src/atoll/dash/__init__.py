"""How a run looks to a person: live in the terminal, a closing summary, and report.html. All read only the events.

LiveView(run_folder)        start(), refresh() about four times a second, stop(); or a `with` block
write_report(run_folder)    one self-contained RUN/report.html
print_summary(run_folder)   what happened and what it cost, in words
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
