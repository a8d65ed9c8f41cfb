"""The container image and the SkyPilot file: every word in them is known, and every file is there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import atoll

ROOT = Path(__file__).parents[2]
IMAGE = ROOT / "deploy" / "Containerfile"
INSTRUCTIONS = {"ARG", "FROM", "ENV", "WORKDIR", "COPY", "RUN", "CMD"}
SKY = {"name", "workdir", "num_nodes", "resources", "file_mounts", "setup", "run", "envs", "secrets"}
SKY_RESOURCES = {"accelerators", "use_spot", "disk_size", "cloud", "infra", "cpus", "memory", "image_id", "ports"}


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", "", IMAGE.read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_the_image_copies_what_is_there_and_installs_what_is_declared() -> None:
    """Linted here; built below, where there are the tools for it."""
    assert {word for word, _ in instructions()} <= INSTRUCTIONS
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        elif word == "RUN":
            assert shlex.split(rest)[0] in ("python", "mkdir", "command")
    extras = next(rest.partition("=")[2] for word, rest in instructions() if rest.startswith("EXTRAS="))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= declared["optional-dependencies"].keys()
    built = {declared["readme"], *declared["license-files"], "pyproject.toml"}
    copied = " ".join(rest for word, rest in instructions() if word == "COPY").split()
    assert built <= set(copied), "the build reads them"


TOOLS = ("buildah", "debootstrap")
STORAGE = ("--storage-driver", "vfs")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Name of an image of a bare Debian with Python, and buildah with a storage of its own."""
    absent = [name for name in TOOLS if shutil.which(name) is None]
    if absent or os.geteuid() != 0:
        why = f"{', '.join(absent)} not installed" if absent else "needs root"
        warnings.warn(f"the container image was NOT built: {why}", stacklevel=1)
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("image")
    buildah = ["buildah", "--root", str(folder / "root"), "--runroot", str(folder / "runroot"), *STORAGE]
    packages = "ca-certificates,python3,python3-pip"
    made = run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", str(folder / "debian"))
    if made.returncode:
        warnings.warn("the container image was NOT built: no Debian mirror answers", stacklevel=1)
        pytest.skip(f"no Debian mirror answers: {made.stdout[-500:]}")
    if CERTIFICATES.exists():  # what this machine trusts for its index, the image must, too
        shutil.copy(CERTIFICATES, folder / "debian" / CERTIFICATES.relative_to("/"))
    work = run(*buildah, "from", "scratch").stdout.strip()
    assert run(*buildah, "add", "--quiet", work, str(folder / "debian"), "/").returncode == 0
    assert run(*buildah, "commit", "--quiet", work, "bare").returncode == 0
    yield "bare", buildah
    run(*buildah, "rm", "--all")
    run(*buildah, "rmi", "--all", "--force")


CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_image_is_built_and_runs(base: tuple[str, list[str]]) -> None:
    """Minutes: a Debian is fetched, and everything that a syncer needs. Kernels are compiled inside."""
    name, buildah = base
    told = [f"BASE=localhost/{name}", "EXTRAS=metrics", f"PIP_OPTIONS=--break-system-packages {index_options()}"]
    arguments = [word for text in told for word in ("--build-arg", text)]
    done = run(*buildah, "bud", "--isolation", "chroot", *arguments, "-f", str(IMAGE), "-t", "atoll:test", ".")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    work = run(*buildah, "from", "atoll:test").stdout.strip()
    own = (*buildah, "run", "--isolation", "chroot", "--user", "1000", work, "--")
    assert run(*own, "python", "-m", "atoll", "version").stdout.strip() == atoll.__version__
    warmed = "python -c 'from atoll import kernels; kernels.warm_up()'"
    seen = run(*own, "sh", "-c", f"touch /var/cache/atoll/mine && {warmed}")
    assert seen.returncode == 0, seen.stderr


def index_options() -> str:
    """Where this machine's pip looks for packages, for a pip that has not read its settings and not its disk."""
    asked = run(sys.executable, "-m", "pip", "config", "list").stdout
    names = re.findall(r"^(?:global|install|:env:)\.((?:extra-)?index-url)='([^']+)'", asked, re.MULTILINE)
    places = [(name, where) for name, value in names for where in value.split() if where.startswith("http")]
    return " ".join(f"--{name}={where}" for name, where in places)


def test_the_skypilot_file_has_known_fields_and_sets_what_a_learner_reads() -> None:
    values = yaml.safe_load((ROOT / "examples" / "jobs" / "skypilot.yaml").read_text())
    assert values.keys() <= SKY and values["resources"].keys() <= SKY_RESOURCES
    for name in ("ATOLL_SYNCER", "ATOLL_TLS_CA", "ATOLL_TOKEN_FILE", "ATOLL_RUN_FOLDER"):
        assert f"{name}=" in values["run"]
    assert (ROOT / "examples" / "train_plain.py").exists() and "examples/train_plain.py" in values["run"]
    assert set(values["file_mounts"]) == {"/tmp/atoll/ca.pem", "/tmp/atoll/token"}
