"""A hook of mkdocs: links that leave docs/, to code and examples. A code host shows those; a built site has none of it.

The site shows their text alone. A link to a file that is not there is a warning, which `mkdocs build --strict` takes
for an error, as it does with broken links between pages.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)[^)#\s]*)(?:#[^)]*)?\)")
log = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called by mkdocs with each page's source."""
    docs = Path(config["docs_dir"]).resolve()
    here = (docs / page.file.src_uri).parent

    def text_only(link: re.Match[str]) -> str:
        target = (here / link.group(2)).resolve()
        if target.is_relative_to(docs):
            return link.group(0)
        if not target.exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, link.group(2))
        return link.group(1)

    return LINK.sub(text_only, markdown)
