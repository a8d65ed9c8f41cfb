from .closing import print_summary
from .live import LiveView
from .report import write_report
from .text import bytes_text, count_text, duration_text, loss_text

__all__ = ["LiveView", "bytes_text", "count_text", "duration_text", "loss_text", "print_summary", "write_report"]
