"""What every figure must satisfy: no text cut off or on another, a PNG of the right size, HTML that closes."""

from __future__ import annotations

import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from atoll.instruments.figures import Picture

SVG = "{http://www.w3.org/2000/svg}"


def texts_of(picture: Picture) -> list[tuple[str, Any]]:
    """(text, its box in pixels) of everything that is written in the figure. Ticks outside the axes are not drawn."""
    figure = picture.figure
    figure.canvas.draw()
    found = list(figure.texts)
    for legend in figure.legends:
        found += legend.get_texts()
    for axes in figure.axes:
        found += [
            *axes.texts,
            axes.title,
            axes._left_title,
            axes.xaxis.label,
            axes.yaxis.label,
            axes.yaxis.get_offset_text(),
        ]
        for axis, (low, high), place in (
            (axes.xaxis, sorted(axes.get_xlim()), 0),
            (axes.yaxis, sorted(axes.get_ylim()), 1),
        ):
            slack = 1e-9 * (high - low)
            labels = axis.get_majorticklabels()
            found += [one for one in labels if low - slack <= one.get_position()[place] <= high + slack]
    return [(one.get_text(), one.get_window_extent()) for one in found if one.get_visible() and one.get_text().strip()]


def check_layout(picture: Picture) -> None:
    written = texts_of(picture)
    width, height = picture.figure.bbox.width, picture.figure.bbox.height
    for text, box in written:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{text!r} is cut off"
    for i, (text, box) in enumerate(written):
        for other, theirs in written[i + 1 :]:
            across = min(box.x1, theirs.x1) - max(box.x0, theirs.x0)
            along = min(box.y1, theirs.y1) - max(box.y0, theirs.y0)
            # Boxes of text include leading; two pixels of 300 per inch cannot be seen.
            assert across <= 2 or along <= 2, f"{text!r} lies on {other!r}"
    for axes in picture.figure.axes:
        box = axes.get_window_extent()
        assert box.width > 0.2 * width and box.height > 60, "the plot itself has hardly any room"


def png_size(path: Path) -> tuple[int, int]:
    """Width and height, after checking the signature and every chunk's checksum."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, names = 8, []
    while at < len(data):
        (size,), name = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        (checksum,) = struct.unpack(">I", data[at + 8 + size : at + 12 + size])
        assert zlib.crc32(data[at + 4 : at + 8 + size]) == checksum
        names.append(name)
        at += 12 + size
    assert names[0] == b"IHDR" and names[-1] == b"IEND"
    return struct.unpack(">II", data[16:24])


def svg_of(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


def titles_of(html: str) -> list[str]:
    """What the mouse shows: the values of each series."""
    return [one.text or "" for one in svg_of(html).iter(f"{SVG}title")]


class Page(HTMLParser):
    """Every element that is opened is closed, in order; ids, references and tables are collected."""

    VOID = frozenset({"meta", "br", "link", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def _note(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        for key, value in attrs:
            if key == "id":
                self.ids.append(value or "")
            if key in ("href", "xlink:href", "src"):
                self.references.append(value or "")
            if key == "clip-path" and value:
                self.references.append(value.removeprefix("url(").removesuffix(")"))
