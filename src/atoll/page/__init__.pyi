from .options import PageOptions, can_serve
from .serving import PageView, RunningPage, serve_page

__all__ = ["PageOptions", "PageView", "RunningPage", "can_serve", "serve_page"]
