"""A seed is a run: the same trace in every process, whatever order its sets and dictionaries have, on every machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.instruments.sim.drawing import draw
from atoll.instruments.sim.run import run_scenario

WITH_ARRAYS = (12, 34, 42)
WITH_REFERENCES = {26: "ab481928763ca1c2", 75: "6492e27d987016c2", 111: "acb6587259fd64aa"}
"""Seed -> digest of its trace. Of both groups some run the defaults, some end because a budget is spent, and in 111
somebody lies. A change of the protocol, of the simulator or of `draw` changes these, and then they are to be written
anew: `atoll sim run --seed N --json` prints the digest as `trace`. Any other reason is a bug: the trace depends on the
machine, on the version of Python or on the order of a set. (With arrays the checksums in a trace come from compiled
arithmetic, which is compared between processes here and between machines by the tests of the kernels.)"""
PROGRAM = """
import sys
from pathlib import Path
from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.drawing import draw

for seed in sys.argv[2:]:
    report = run_scenario(draw(int(seed)), tracing=True)
    trace = [report.digest, repr(report.final), repr(report.violations), *report.lines]
    (Path(sys.argv[1]) / seed).write_text("\\n".join(trace))
"""


def traces(folder: Path, hash_seed: int) -> dict[int, list[str]]:
    """What a fresh process makes of the seeds, with its own order of hashes."""
    folder.mkdir()
    seeds = [*WITH_ARRAYS, *WITH_REFERENCES]
    command = [sys.executable, "-c", PROGRAM, str(folder), *map(str, seeds)]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    subprocess.run(command, check=True, timeout=300, env=environment)
    return {seed: (folder / str(seed)).read_text().splitlines() for seed in seeds}


def test_two_processes_with_other_hash_orders_give_the_same_trace(tmp_path: Path) -> None:
    ours, theirs = traces(tmp_path / "one", 1), traces(tmp_path / "two", 4711)
    for seed, lines in ours.items():
        assert len(lines) > 500, f"seed {seed} has hardly a trace"
        others = theirs[seed]
        parted = next((n for n, pair in enumerate(zip(lines, others, strict=False)) if pair[0] != pair[1]), None)
        assert parted is None or parted < 3, f"seed {seed} parts at {lines[parted]!r} and {others[parted]!r}"
        assert lines == others, f"seed {seed}: one trace ends before the other, or the result differs"


def test_the_scenarios_are_what_they_are_meant_to_be() -> None:
    for seed in WITH_ARRAYS:
        assert draw(seed).arrays and len(draw(seed).faults) >= 9
    for seed in WITH_REFERENCES:
        assert not draw(seed).arrays and len(draw(seed).faults) >= 9


@pytest.mark.parametrize("seed", WITH_REFERENCES)
def test_every_machine_gives_this_trace(seed: int) -> None:
    assert run_scenario(draw(seed), tracing=True).digest == WITH_REFERENCES[seed]
