"""How a user brings a codec, a merge, an outer optimizer and a pacing policy of their own into a run."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_codec import SPARSE
from toy_merge import HALF_MEAN
from toy_outer import ADAM
from toy_pacing import PATIENT

import atoll
from atoll.plugins import GROUPS

OWN = {
    "codec_up": "toy-sparse",
    "codec_down": "toy-sparse",
    "merge": "toy-half",
    "outer": "toy-adam",
    "pacing": "toy-patient",
}
"""The settings that name them."""
_OFFERED = """
[atoll.codecs]
toy-sparse = toy_codec:SPARSE
[atoll.merges]
toy-half = toy_merge:HALF_MEAN
[atoll.outer]
toy-adam = toy_outer:ADAM
[atoll.pacing]
toy-patient = toy_pacing:PATIENT
"""


def forgotten_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered in this test stays in this test."""
    for registry in GROUPS.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a call, in this process."""
    forgotten_after(monkeypatch)
    atoll.register_codec("toy-sparse", SPARSE)
    atoll.register_merge("toy-half", HALF_MEAN)
    atoll.register_outer("toy-adam", ADAM)
    atoll.register_pacing("toy-patient", PATIENT)


def install(folder: Path) -> None:
    """What pip leaves in a folder of a package that offers them by entry points."""
    about = folder / "toys-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_OFFERED)
