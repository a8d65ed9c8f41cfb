from .closing import print_summary
from .lanes import lane
from .live import LiveView
from .page import static
from .pieces import head, log_lines, picture, rows
from .report import write_report
from .text import bytes_text, count_text, duration_text, loss_text

__all__ = [
    "LiveView",
    "bytes_text",
    "count_text",
    "duration_text",
    "head",
    "lane",
    "log_lines",
    "loss_text",
    "picture",
    "print_summary",
    "rows",
    "static",
    "write_report",
]
