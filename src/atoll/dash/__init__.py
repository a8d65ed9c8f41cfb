"""How a run looks to a person: live in the terminal, a closing summary, and report.html. All read only the events.

LiveView(run_folder)        start(), refresh() about four times a second, stop(); or a `with` block
write_report(run_folder)    one self-contained RUN/report.html
print_summary(run_folder)   what happened and what it cost, in words
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.dash.closing import print_summary
    from atoll.dash.live import LiveView
    from atoll.dash.report import write_report

# rich is imported only when something is shown.
_HOME = {"LiveView": "live", "print_summary": "closing", "write_report": "report"}

__all__ = ["LiveView", "print_summary", "write_report"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
