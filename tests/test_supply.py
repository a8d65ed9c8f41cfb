"""What is installed: the lock with its hashes, how scripts/install uses it, and the audit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def audit() -> Any:
    loader = SourceFileLoader("audit", str(ROOT / "scripts" / "audit"))
    spec = spec_from_loader("audit", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


# ---------------------------------------------------------------- the lock


def test_everything_that_is_asked_for_is_locked_in_a_version_that_fits(audit: Any) -> None:
    """If this fails, pyproject.toml has changed since: run scripts/lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["project"]["dependencies"],
        *(one for name in ("torch", "dev", "integrations", "jax") for one in extras[name]),
    ]
    asked += project["build-system"]["requires"]  # else an isolated build would fetch it unseen
    asked += [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins = audit.locked()
    wrong = [one for one in map(Requirement, asked) if one.specifier and not one.specifier.contains(pins[_name(one)])]
    assert not wrong and all(_name(Requirement(one)) in pins for one in asked)


def _name(requirement: Requirement) -> str:
    return canonicalize_name(requirement.name)


def test_every_locked_file_has_a_hash_and_no_address_is_in_the_lock() -> None:
    text = (ROOT / "requirements.lock").read_text()
    blocks = re.split(r"^(?=[A-Za-z0-9])", re.sub(r"^#.*\n", "", text, flags=re.M), flags=re.M)[1:]
    assert len(blocks) > 50
    assert all(re.search(r"^\s+--hash=sha256:[0-9a-f]{64}", block, flags=re.M) for block in blocks)
    assert "://" not in text and "--index" not in text and "--find-links" not in text


# ---------------------------------------------------------------- scripts/install

FAKE_PYTHON = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  *"import platform"*) exit $OTHER_PYTHON ;;
  *--require-hashes*) [ -z "$PIP_SAYS" ] || { echo "$PIP_SAYS"; exit 1; } ;;
esac
"""


def install(folder: Path, *, pip_says: str = "", other_python: int = 0, **more: str) -> tuple[int, str, list[str]]:
    """Exit status, output, and what pip was told, of scripts/install with a Python that only notes."""
    (folder / "scripts").mkdir()
    for name in ("scripts/install", "pyproject.toml", "constraints.txt", "requirements.lock"):
        shutil.copy(ROOT / name, folder / name)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    calls = folder / "calls"
    environment = {**os.environ, "CALLS": str(calls), "PIP_SAYS": pip_says, "OTHER_PYTHON": str(other_python), **more}
    environment.pop("ATOLL_LOCKED", None) if "ATOLL_LOCKED" not in more else None
    done = subprocess.run(["scripts/install"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    told = [line for line in calls.read_text().splitlines() if "pip install" in line]
    return done.returncode, done.stderr, told


def test_where_the_lock_fits_nothing_is_installed_without_a_hash(tmp_path: Path) -> None:
    code, _, told = install(tmp_path)
    assert code == 0 and len(told) == 2
    assert "--require-hashes --requirement requirements.lock" in told[0]
    assert "--no-deps --no-build-isolation --editable ." in told[1]


def test_a_file_that_differs_from_its_hash_stops_it(tmp_path: Path) -> None:
    wrong = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE."
    code, said, told = install(tmp_path, pip_says=wrong)
    assert code == 1 and len(told) == 1 and "look before you go on" in said


def test_files_that_cannot_be_had_are_no_reason_to_stop_unless_it_must_be_locked(tmp_path: Path) -> None:
    for name, more in (("free", {}), ("locked", {"ATOLL_LOCKED": "1"})):
        (tmp_path / name).mkdir()
        code, said, told = install(tmp_path / name, pip_says="ERROR: No matching distribution found for x", **more)
        if more:
            assert code == 1 and len(told) == 1
        else:
            assert code == 0 and "without hashes" in said and "--constraint constraints.txt" in told[1]


def test_another_python_goes_by_the_constraints_and_says_so(tmp_path: Path) -> None:
    code, said, told = install(tmp_path, other_python=1)
    assert code == 0 and "No hashes are compared" in said
    assert len(told) == 1 and "--constraint constraints.txt" in told[0]


# ---------------------------------------------------------------- scripts/audit


def lock(folder: Path, *pins: str) -> Path:
    path = folder / "lock"
    path.write_text("".join(f"{pin} \\\n    --hash=sha256:{'0' * 64}\n" for pin in pins))
    return path


def advisory(name: str, **more: Any) -> dict[str, Any]:
    affected = {"package": {"ecosystem": "PyPI", "name": name}}
    affected |= {key: more.pop(key) for key in ("versions", "ranges") if key in more}
    affected["package"] |= more.pop("package", {})
    return {"id": "OSV-1", "aliases": ["CVE-1"], "summary": "bad", "affected": [affected], **more}


def span(*events: dict[str, str], kind: str = "ECOSYSTEM") -> list[dict[str, Any]]:
    return [{"type": kind, "events": list(events)}]


@pytest.mark.parametrize(
    ("entry", "is_known"),
    [
        (advisory("a-b", versions=["1.2"]), True),
        (advisory("A_b", versions=["1.2.0"]), True),
        (advisory("a-b", versions=["1.3"]), False),
        (advisory("a-b", ranges=span({"introduced": "0"}, {"fixed": "1.3"})), True),
        (advisory("a-b", ranges=span({"introduced": "0"}, {"fixed": "1.2"})), False),
        (advisory("a-b", ranges=span({"introduced": "1.2"}, {"last_affected": "1.2"})), True),
        (advisory("a-b", ranges=span({"introduced": "0"}, {"last_affected": "1.1"})), False),
        (advisory("a-b", ranges=span({"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "1.1"})), True),
        (advisory("a-b", ranges=span({"introduced": "1.2"}, {"fixed": "soon"})), True),  # somebody has to look
        (advisory("a-b", ranges=span({"introduced": "0"}, kind="GIT")), False),
        (advisory("a-b", versions=["1.2"], withdrawn="2026-01-01T00:00:00Z"), False),
        (advisory("a-b", versions=["1.2"], package={"ecosystem": "npm"}), False),
        (advisory("other", versions=["1.2"]), False),
    ],
)
def test_an_advisory_is_compared_with_what_is_locked(audit: Any, tmp_path: Path, entry: Any, is_known: bool) -> None:
    pins = audit.locked(lock(tmp_path, "a-b==1.2+cpu"))
    assert pins == {"a-b": Version("1.2")}
    assert [name for name, _ in audit.against(entry, pins)] == (["a-b"] if is_known else [])


def test_lists_may_be_files_folders_and_archives(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pins = lock(tmp_path, "a==1", "b==2")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps(advisory("a", ranges=span({"introduced": "0"}, {"fixed": "1.5"}))))
    (folder / "two.json").write_text(json.dumps([advisory("c", versions=["3"])]))
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(folder / "one.json", "OSV-1.json")
    for given in (folder, folder / "one.json", tmp_path / "all.zip"):
        assert audit.main(["--lock", str(pins), str(given)]) == 1
        assert "a 1: CVE-1, OSV-1; mended in 1.5; bad" in capsys.readouterr().out
    assert audit.main(["--lock", str(pins), str(folder / "two.json")]) == 0
    assert audit.main(["--lock", str(pins), "--ignore", "CVE-1", str(folder)]) == 0
    assert "(ignored)" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", "{}", "not JSON"])
def test_without_a_list_it_is_not_called_clean(
    audit: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "list.json").write_text(text)
    for given in ("list.json", "no-such-file"):
        assert audit.main(["--lock", str(lock(tmp_path, "a==1")), str(tmp_path / given)]) == 2
        assert "not audited" in capsys.readouterr().err


@pytest.fixture
def index(audit: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A package index on loopback that tells advisories about the releases in here."""
    known: dict[str, Any] = {}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told = known.get(self.path)
            self.send_response(404 if told is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps({"vulnerabilities": told}).encode())

        def log_message(self, *arguments: object) -> None:
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(audit, "index_url", lambda: f"http://127.0.0.1:{server.server_port}")
    yield known
    server.shutdown()
    server.server_close()


def test_the_index_is_asked_where_no_list_is_given(
    audit: Any, tmp_path: Path, index: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pins = str(lock(tmp_path, "a==1", "b==2"))
    assert audit.main(["--lock", pins]) == 2  # it knows nothing at all, as many mirrors do
    assert "tells no advisories" in capsys.readouterr().err
    index |= {"/a/1/json": [], "/b/2/json": []}
    assert audit.main(["--lock", pins]) == 0
    index["/b/2/json"] = [{"id": "OSV-2", "aliases": [], "fixed_in": ["2.1"], "summary": "bad"}]
    assert audit.main(["--lock", pins]) == 1
    assert "b 2: OSV-2; mended in 2.1; bad" in capsys.readouterr().out
    del index["/b/2/json"]
    assert audit.main(["--lock", pins]) == 2  # in part is not found out
    assert "does not know them: b" in capsys.readouterr().err
