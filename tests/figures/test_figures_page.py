"""One page with everything: closes, stands alone, and escapes what it is given."""

from __future__ import annotations

from pathlib import Path

from figure_checks import Page
from figure_samples import PLAIN

from atoll.instruments.figures import PageTable, Section, page


def test_a_page_with_every_figure(tmp_path: Path) -> None:
    pictures = [make() for make in PLAIN.values()]
    saved = [picture.save(tmp_path / str(i)) for i, picture in enumerate(pictures)]
    sections = [
        Section("Saved", ["A text.\n\nAnother one.", *saved, pictures[0].table]),
        Section("Tables", [picture.table for picture in pictures]),
    ]
    made = page(tmp_path / "out" / "index", "A <title>", "An intro & more.", sections)
    text = made.read_text(encoding="utf-8")
    assert made.name == "index.html" and "A &lt;title&gt;" in text and "intro &amp; more" in text
    parsed = Page(text)
    assert parsed.count["svg"] == parsed.count["figure"] == len(PLAIN)
    assert parsed.count["table"] == len(PLAIN) + 1 and parsed.count["h2"] == 2
    assert "script" not in parsed.count and "link" not in parsed.count
    assert all(reference.startswith("#") for reference in parsed.references), "the page needs something from outside"
    assert len(parsed.ids) == len(set(parsed.ids)), "two figures share an id"


def test_pictures_can_be_given_as_they_are_and_stand_in_one_row(tmp_path: Path) -> None:
    one, two = PLAIN["goodput"](), PLAIN["collapse"]()
    text = page(tmp_path / "x.htm", "t", "", [Section("s", [one, two, "then text", one])]).read_text(encoding="utf-8")
    assert text.count('<div class="figures">') == 2 and text.index("then text") < text.rindex("<figure")
    assert (tmp_path / "x.htm").exists()


def test_tables_are_accessible_and_numbers_flush_right() -> None:
    html = PageTable(
        "Losses <1", ("run", "loss", "note"), [("M = 8", "+1.2 ± 0.3", "a & b"), ("M = 4", "–", "")]
    ).html()
    Page(html)
    assert '<th class="number" scope="col">loss</th>' in html and '<th scope="row">M = 8</th>' in html
    assert '<td class="number">+1.2 ± 0.3</td>' in html and "a &amp; b" in html
    assert 'aria-label="Losses &lt;1"' in html and "<caption>Losses &lt;1</caption>" in html
