"""What a release is: a wheel and an sdist that install into an empty environment, and notes from the changelog."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import warnings
import zipfile
from pathlib import Path

import pytest
import said
from cluster import SyncerProcess

import atoll
from atoll.core import PROTOCOL_OLDEST, PROTOCOL_VERSION
from atoll.launch import compare_builds

ROOT = Path(__file__).parent.parent
BUILD = "import hatchling.build as b, sys; print(b.build_wheel(sys.argv[1])); print(b.build_sdist(sys.argv[1]))"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pytest.importorskip("hatchling", reason="pip install hatchling")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    wheel, sdist = (folder / name for name in done.stdout.split())
    return wheel, sdist


def test_the_wheel_holds_the_product_and_nothing_else(built: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert {"atoll/__init__.py", "atoll/py.typed", "atoll/dash/static/style.css", "atoll/engines/slurm.py"} <= names
    assert {"atoll/core/__init__.pyi", "atoll/wire/generated/atoll_pb2.py"} <= names  # front doors are read at run time
    assert {name.partition("/")[0] for name in names} == {"atoll", f"atoll-{atoll.__version__}.dist-info"}
    with tarfile.open(built[1]) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "src/atoll/__init__.py", "README.md", "LICENSE"} <= inside


def test_it_installs_into_an_empty_environment_and_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Its dependencies are those of this environment: fetching them anew would test the network."""
    home = tmp_path / "empty"
    venv.create(home, with_pip=False, symlinks=True)
    site = next(home.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(site), str(built[0])], check=True, timeout=300)
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    script = "import atoll, atoll.app; print(atoll.__file__); atoll.app.main()"
    done = subprocess.run(
        [str(home / "bin" / "python"), "-c", script, "version"],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin"},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split()
    assert Path(where).is_relative_to(site) and version == atoll.__version__
    assert (site / "bin" / "atoll").exists()


@pytest.mark.heavy
def test_it_installs_with_its_dependencies_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    """`pip install atoll` as a user would, into an environment that has nothing: no PyTorch comes with it."""
    home = tmp_path / "empty"
    venv.create(home, with_pip=True, symlinks=True)
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    pip = [
        str(home / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--retries",
        "0",
        "--timeout",
        "15",
    ]
    asked = [*pip, "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "xxhash"]
    if subprocess.run(asked, env=clean, capture_output=True, timeout=120).returncode:
        warnings.warn("the wheel was NOT installed with its dependencies: no package index answers", stacklevel=1)
        pytest.skip("no package index answers")
    done = subprocess.run([*pip, "install", "--quiet", str(built[0])], env=clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert subprocess.run([*pip, "check"], env=clean, capture_output=True).returncode == 0

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [str(home / "bin" / words[0]), *words[1:]]
        return subprocess.run(argv, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300)

    assert run("atoll", "version").stdout.strip() == atoll.__version__
    assert run("python", "-c", "import torch").returncode != 0
    found = run("python", "-c", "import atoll.syncer.serve, atoll.wire, atoll.observe; print('a syncer needs no more')")
    assert found.returncode == 0, found.stderr
    told = run("atoll", "train", "--learners", "1")
    assert told.returncode == 2 and "pip install 'atoll[torch]'" in told.stderr
    (tmp_path / "runs" / "events").mkdir(parents=True)
    told = run("atoll", "dash", str(tmp_path / "runs"))
    assert told.returncode == 2 and "pip install 'atoll[dash]'" in told.stderr, told.stderr


def test_every_extra_is_in_the_documentation() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    told = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "howto" / "install.md").read_text(), re.MULTILINE)
    assert told == [name for name in told if name in declared] and set(told) == set(declared)


def test_one_version_everywhere() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == atoll.__version__


def test_release_notes_are_the_section_of_the_changelog(tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / "release-notes"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## 1.10.0 (soon)\n\n- new\n\n## 1.1.0\n\n- old\n- older\n")
    assert run("1.1.0", "--file", str(changes)).stdout == "- old\n- older\n"
    assert run("1.10.0", "--file", str(changes)).stdout == "- new\n"
    missing = run("1.1", "--file", str(changes))
    assert missing.returncode == 1 and "it has 1.10.0, 1.1.0" in missing.stderr
    assert run(atoll.__version__).stdout.strip()  # ours


def test_a_build_is_compared_with_a_syncer_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerProcess(tmp_path)
    version = said.command("version", monkeypatch=monkeypatch, capsys=capsys)
    done = version("--check", syncer.address)
    assert done.code == 0 and f"both speak protocol {PROTOCOL_VERSION}" in done.stdout
    assert done.stdout.splitlines()[0] == atoll.__version__
    assert syncer.stop() == 0


@pytest.mark.parametrize(
    "protocols, fits",
    [
        ((PROTOCOL_VERSION, PROTOCOL_VERSION + 1), True),
        ((PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2), False),
        ((0, PROTOCOL_OLDEST - 1), False),
    ],
)
def test_builds_that_share_no_protocol_are_told_apart(protocols: tuple[int, int], fits: bool) -> None:
    text, found = compare_builds({"build": {"version": "9", "protocols": list(protocols)}})
    assert found is fits and ("cannot work together" in text) is not fits
    assert compare_builds({})[1]  # one that does not tell
