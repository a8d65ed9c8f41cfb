"""The documentation: it builds without a broken link, fetches nothing, is what the code says, and is wrapped."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README_LINES_MAX = 120
FETCHED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements whose address a browser fetches by itself."""
RECORDED = ("LOG.md", "results")
"""What was true on its day: files named there may be gone."""


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(argv, capture_output=True, text=True, timeout=240, env=environment)


class Fetched(HTMLParser):
    """Addresses outside of the site that a reader's browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        address = values.get(FETCHED.get(tag, "")) or ""
        if address.startswith(("http:", "https:", "//")) and values.get("rel") != "canonical":
            self.found.append(address)


def test_the_site_builds_without_a_broken_link_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 25
    seen = Fetched()
    for page in pages:
        seen.feed(page.read_text(encoding="utf-8"))
    assert seen.found == []


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    broken = ("none.md", "../none.py", "#none")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n\n" + "\n".join(f"[somewhere]({link})" for link in broken))
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "site_links.py", tmp_path / "scripts")
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0].replace("name: material", "name: mkdocs")
    theme = re.compile(r"^  (font|features|palette):.*\n(    .*\n)*", re.MULTILINE)  # of the other theme, which is slow
    (tmp_path / "mkdocs.yml").write_text(theme.sub("", settings))
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert [link for link in broken if link not in done.stdout + done.stderr] == []


def test_the_reference_is_what_the_code_says() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "reference", "--check"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prose_is_wrapped_at_100_columns() -> None:
    pages = [p for p in DOCS.rglob("*.md") if p.parent.name not in ("reference", "results")]
    argv = [sys.executable, ROOT / "scripts" / "wrap", "--check", ROOT / "README.md", ROOT / "CONTRIBUTING.md", *pages]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_wrapping_changes_line_ends_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    words = "a long thought about `one command` that goes on and on " * 4
    code, table, fence = "    code " + "x " * 60, "| a table | " + "y " * 60 + "|", "```sh\n" + "z " * 70 + "\n```"
    page.write_text(f"# Head\n\n{words}\n- item {words}\n  {words}\n\nThen:\n\n{code}\n\n{table}\n\n{fence}\n")
    subprocess.run([sys.executable, ROOT / "scripts" / "wrap", page], check=True, capture_output=True, timeout=60)
    text = page.read_text()
    assert all(kept in text for kept in (code, table, fence)) and text.count("`one command`") == 12
    assert all(len(line) <= 100 for line in text.partition("Then:")[0].split("\n"))
    assert "\n- item a long" in text and "\n  " in text


def test_wrapping_leaves_code_alone_that_follows_a_list(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    drawing = "    one line of a drawing\n    and another\n\n    and a third, " + "x " * 60 + "\n"
    lists = ("- item\n", "1. item\n\n   more of it\n", "- item\n  - inner item\n")
    between = ("\n## Head\n\n", "## Head\n\n", "\nProse.\n\n")
    text = "".join(before + gap + drawing for before in lists for gap in between)
    page.write_text(text + "- item\n\n      code of the item\n      more\n")
    before = page.read_text()
    subprocess.run([sys.executable, ROOT / "scripts" / "wrap", page], check=True, capture_output=True, timeout=60)
    assert page.read_text() == before


def test_the_readme_is_short_and_everything_it_names_is_there() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split("\n")) <= README_LINES_MAX
    assert "    scripts/demo" in text and "    scripts/test" in text
    assert "atoll.load_model(" in text  # load_state_dict(strict=False) loads nothing without a word
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (ROOT / link).exists(), f"{page.name} links to {link}"


def test_files_that_the_pages_name_are_there() -> None:
    """In backticks and with a folder: `core/policy.py` of the package, `tests/core/world.py` of the checkout."""
    places = (ROOT, ROOT / "src" / "atoll", ROOT / "src" / "atoll" / "instruments", DOCS, ROOT / "studies")
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        if page.relative_to(ROOT).parts[1:2] and page.relative_to(DOCS).parts[0] in RECORDED:
            continue
        for name in re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|toml|proto|md))`", page.read_text()):
            if not name.startswith("runs/") and not any((place / name).exists() for place in places):
                missing.append(f"{page.relative_to(ROOT)}: {name}")
    assert missing == []


def test_every_option_that_the_pages_type_is_one_that_the_command_has() -> None:
    from typer.main import get_command

    from atoll.app import app

    root, wrong = get_command(app), []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")):
        if page.relative_to(ROOT).parts[1:2] and page.relative_to(DOCS).parts[0] in RECORDED:
            continue
        text = page.read_text().replace("\\\n", " ")
        typed = re.findall(r"^(?:    |\$ |)(?:\$ |[A-Z_]+=\S+ )*atoll ([^\n]*)", text, re.MULTILINE)
        typed += re.findall(r"`atoll ([^`]*)`", text)
        for words in typed:
            command, used = root, words.split("#")[0].split(" -- ")[0].split(";")[0].split()
            while used and hasattr(command, "commands") and used[0] in command.commands:
                command, used = command.commands[used[0]], used[1:]
            known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
            if not hasattr(command, "commands"):
                given = [word.split("=")[0].rstrip(",.") for word in used if re.match(r"--[a-z]", word)]
                wrong += [f"{page.relative_to(ROOT)}: atoll {words}: {name}" for name in given if name not in known]
    assert wrong == []


def test_the_page_on_the_paper_lists_every_setting_of_the_preset_where_it_belongs() -> None:
    from dataclasses import fields

    from atoll.core.config import SyncConfig
    from atoll.core.presets import SYNC_PRESETS

    page = (DOCS / "PAPER.md").read_text()
    differ, agree = page.partition("## Where they agree")[0], page.partition("## Where they agree")[2].split("\n## ")[0]
    defaults = {field.name: field.default for field in fields(SyncConfig)}
    for name, value in SYNC_PRESETS["paper"].items():
        place = agree if defaults[name] == value else differ
        assert f"\n| `{name}`" in place, name


def test_the_tree_of_the_page_on_places_is_the_tree_of_the_checkout() -> None:
    page = (DOCS / "concepts" / "places.md").read_text()
    package = ROOT / "src" / "atoll"

    def named(columns: int) -> set[str]:
        """The entries that stand so many columns in, with what is behind the last dot left on."""
        return set(re.findall(rf"^ {{{columns}}}([a-z]+(?:/|\.py))  ", page, re.MULTILINE))

    def here(folder: Path) -> set[str]:
        rooms = {f"{path.name}/" for path in folder.iterdir() if (path / "__init__.py").exists()}
        return rooms | {path.name for path in folder.glob("[a-z]*.py")}

    assert named(6) == here(package)
    assert named(8) == here(package / "instruments")
    scripts = page.partition("    scripts/ ")[2].partition("    docs/ ")[0]
    commands = {path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix}
    assert {name for name in commands if not re.search(rf"\b{name}\b", scripts)} == set()


def test_the_walk_of_one_contribution_is_a_way_without_returns() -> None:
    page = (DOCS / "concepts" / "walk.md").read_text()
    drawn = re.findall(r"^ +\d+ (\S+\.py) ", page, re.MULTILINE)
    told = re.findall(r"`([\w/]+\.py)`", page)
    assert len(drawn) >= 10 and len(told) == len(set(told))
    assert [name for name in told if name in drawn] == drawn


def test_every_name_on_the_walk_is_one_of_the_file_or_of_the_protocol() -> None:
    page = (DOCS / "concepts" / "walk.md").read_text()
    sources = [path.read_text() for path in (ROOT / "src" / "atoll").rglob("*.py")]
    named = re.findall(r"`([A-Za-z_]+)`", page)
    assert len(named) > 8
    missing = [name for name in named if not any(re.search(rf"(class|def) {name}\b", text) for text in sources)]
    assert set(missing) <= {"robust", "overwrite"}  # settings
    for stop, word in (("publication", "Published("), ("contribution_maker", "Contribute("), ("arrays", "adopt(")):
        path = next(path for path in (ROOT / "src" / "atoll").rglob(f"{stop}.py") if path.parent.name in page)
        assert word in path.read_text(), f"{stop} is where the walk says that {word} is made"
