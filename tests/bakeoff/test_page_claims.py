"""What our texts say of other systems points at a row that was measured, and the page of rows is that of its file."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PEERS = re.compile(r"torchft|hivemind|\bFlower\b|NVIDIA FLARE|NVFlare|DDP gloo", re.IGNORECASE)
COMPARES = re.compile(r"faster than|quicker than|slower than|\bunlike\b", re.IGNORECASE)
OF_OURSELVES = ("Unlike in a storm they overlap", "would fail faster than they come back")
"""One part of Atoll against another, or a failure against its mending: nobody else is meant."""
LINK = re.compile(r"\]\((?:docs/)?(?:results/)?peers\.md")


def texts() -> list[tuple[str, str]]:
    """Paragraphs and rows of README and docs. The log is history, and the page of the comparison has its rows."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    left_out = {ROOT / "docs" / "LOG.md", ROOT / "docs" / "results" / "peers.md"}
    found = []
    for page in (page for page in pages if page not in left_out):
        for block in page.read_text().split("\n\n"):
            parts = block.splitlines() if block.lstrip().startswith("|") else [block]
            found += [(str(page.relative_to(ROOT)), " ".join(part.split())) for part in parts]
    return found


def test_whoever_is_named_beside_us_is_in_a_row_of_the_comparison() -> None:
    unproved = [(page, text[:120]) for page, text in texts() if PEERS.search(text) and not LINK.search(text)]
    assert not unproved, "name the row: link docs/results/peers.md"


def test_faster_than_and_unlike_have_a_report() -> None:
    unproved = [
        (page, text[:160])
        for page, text in texts()
        if COMPARES.search(text) and "](" not in text and not page.startswith("docs/results/")
        if not any(known in text for known in OF_OURSELVES)
    ]
    assert not unproved, "link the report with the numbers"


def test_numbers_against_peers_are_those_of_the_page() -> None:
    page = " ".join((ROOT / "docs" / "results" / "peers.md").read_text().split())
    claims = [
        (where, f"{ours} against {theirs}")
        for where, text in texts()
        if LINK.search(text)
        for ours, theirs in re.findall(r"(\d[\d.]*) against (\d[\d.]*\d)", text.replace("**", ""))
    ]
    assert claims, "README and the index of results have some"
    assert [claim for claim in claims if claim[1] not in page] == []


def test_the_page_is_what_its_file_of_results_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "peers"))
    before = set(sys.modules)
    module, results = importlib.import_module("page"), ROOT / "docs" / "results" / "peers.jsonl"
    said = " ".join(results.with_suffix(".md").read_text().split())
    for lines in module.verdicts(module.read_cells(results)):
        for line in lines:
            assert " ".join(line.split()) in said, "make it again: benchmarks/peers/page.py docs/results/peers.jsonl"
    for name in set(sys.modules) - before:
        if not name.startswith("atoll"):
            sys.modules.pop(name)
    assert "scripts/bakeoff --quick" in said, "how a reader disproves us"
