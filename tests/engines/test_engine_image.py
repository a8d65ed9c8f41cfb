"""The container image and the SkyPilot file: every word in them is known, and every file is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import yaml

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
    """It is linted, and was built by hand (docs/howto/kubernetes.md): a build needs a base image and an index."""
    assert {word for word, _ in instructions()} <= INSTRUCTIONS
    for word, rest in instructions():
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        elif word == "RUN":
            assert shlex.split(rest)[0] in ("python3", "mkdir")
    extras = next(rest.partition("=")[2] for word, rest in instructions() if rest.startswith("EXTRAS="))
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= declared["optional-dependencies"].keys()
    built = {declared["readme"], *declared["license-files"], "pyproject.toml"}
    copied = " ".join(rest for word, rest in instructions() if word == "COPY").split()
    assert built <= set(copied), "the build reads them"


def test_the_skypilot_file_has_known_fields_and_sets_what_a_learner_reads() -> None:
    values = yaml.safe_load((ROOT / "examples" / "jobs" / "skypilot.yaml").read_text())
    assert values.keys() <= SKY and values["resources"].keys() <= SKY_RESOURCES
    for name in ("ATOLL_SYNCER", "ATOLL_TLS_CA", "ATOLL_TOKEN_FILE", "ATOLL_RUN_FOLDER"):
        assert f"{name}=" in values["run"]
    assert (ROOT / "examples" / "train_plain.py").exists() and "examples/train_plain.py" in values["run"]
    assert set(values["file_mounts"]) == {"/tmp/atoll/ca.pem", "/tmp/atoll/token"}
