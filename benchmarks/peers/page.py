"""docs/results/peers.md and its figure, from a file of results: where Atoll loses or ties comes first.

python benchmarks/peers/page.py docs/results/peers.jsonl
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

from pictures import write_figures
from scenarios import SEARCH
from systems import SYSTEMS
from tables import MEASURES, Cells, head, read_cells, tables, the_rest

OURS = "atoll"
HIGHER = ("steps_per_s",)
"""Of these more is better; of all others less."""
SPENT = tuple(name for name in MEASURES if name.endswith(("_memory_mb", "_cpu_s_per_step")))
"""Whoever has spent nothing has no such process, or it had ended: that is no comparison."""
NOISE, LOSS_NOISE = 0.15, 0.02
"""Of one run, as a share: by the first trials of this comparison."""
TOP = """# Beside others

Atoll and the systems of its field: the same model, data, inner optimizer, hosts and clock; the peers as they come from
the package index, with their authors' settings. {head}

    {command}

makes it again on any Linux machine (root, for the links), and `scripts/bakeoff --quick` a small form of it in a quarter
of an hour. Results, one line for each run: `docs/results/peers.jsonl`. This page: `benchmarks/peers/page.py`.

What to know before reading:

- A step takes a fixed time, by sleeping; so equal machines are equal, and what is compared is what the systems add.
- A run in which nothing was exchanged is an error and no number: steps that nobody merges are easily made.
- **Useful steps** are those that are in the model. Atoll's ledger, torchft's commits, hivemind's epochs, Flower's
  merged rounds and those that NVIDIA FLARE has followed with another say which were thrown away.
- Every host has a network namespace of its own. Links are limited there, for every system alike.
- Atoll runs with TLS and a token, NVIDIA FLARE with keys on both sides, the others in plain text. Atoll's traffic is
  coded in 4 bits by default; the others send 32, as they come.
- Loss at equal time is that of worker 0's own model when the window ends. Loss at equal tokens is that of the model
  that the system hands to its user; for hivemind the mean of all workers' models. Outer settings of each system are
  the best of the same six (row search), tried with a seed of their own.
- torchft has no retries of its quorum as it comes. With TORCHFT_QUORUM_RETRIES=20 it came back 24 to 28 s after its
  lighthouse did, in an earlier trial; here it is as it comes.
- NVIDIA FLARE is provisioned, and its server and sites are started, as its kits say; a job is handed in once all
  sites are there. A site starts the process that trains, and is killed with it. One that comes back registers again,
  but the job that runs goes on without it; with all sites in a round it waits for those that began.
- DDP and FSDP exchange in each step: a killed rank ends all of it, and nobody can come in. Such cells say so, and are
  no zeros.
- A cell with one run is marked. There a difference below {noise} counts as a tie; else two are apart whose ranges do
  not touch.
- Lines of code: those that the system's script has and the bare one has not, without blank ones, comments and what
  only this benchmark needs.
"""


def write_page(results: Path, command: str) -> Path:
    cells = read_cells(results)
    page = results.with_suffix(".md")
    lines = [TOP.format(head=head(cells)[0], command=command, noise=f"{NOISE:.0%} ({LOSS_NOISE:.0%} of a loss)")]
    worse, ties, better = verdicts(cells)
    for title, found in (("Where Atoll loses", worse), ("Where it ties", ties), ("Where it is ahead", better)):
        lines += [f"\n## {title}\n", *(found or ["- nowhere, of what was measured"])]
    for title, picture in write_figures(cells, page.parent / "figures", "peers-"):
        lines.append(f"\n![{title}: useful steps as a share of the ideal](figures/{picture.name})")
    page.write_text("\n".join([*lines, *tables(cells), *the_rest(cells)]) + "\n")
    return page


def verdicts(cells: Cells) -> tuple[list[str], list[str], list[str]]:
    """Atoll's defaults against the best peer of each row, a line a measure. Apart are two whose ranges do not touch;
    the range of a single run is its noise."""
    worse: dict[str, list[str]] = {}
    ties: dict[str, list[str]] = {}
    better: dict[str, list[str]] = {}
    for label, measure, ours, rival, theirs in _pairs(cells):
        sign = 1 if measure in HIGHER else -1
        (low, high), (their_low, their_high) = _range(ours, measure), _range(theirs, measure)
        over, under = low > their_high, high < their_low
        ahead, behind = (over, under) if sign > 0 else (under, over)
        form = MEASURES[measure][1]
        mine, best = form.format(statistics.median(ours)), form.format(statistics.median(theirs))
        text = f"{label} {mine} against {best} ({rival})"
        (better if ahead else worse if behind else ties).setdefault(MEASURES[measure][0], []).append(text)
    return _lines(worse), _lines(ties), _lines(better)


def _range(found: list[float], measure: str) -> tuple[float, float]:
    noise = LOSS_NOISE if measure == "loss" else NOISE
    half = noise / 2 * abs(found[0]) if len(found) == 1 else 0.0
    return min(found) - half, max(found) + half


def _lines(found: dict[str, list[str]]) -> list[str]:
    order = [title for title, _ in MEASURES.values()]
    return [f"- {title}: {'; '.join(found[title])}" for title in order if title in found]


def _pairs(cells: Cells) -> Iterator[tuple[str, str, list[float], str, list[float]]]:
    for label in dict.fromkeys(label for label, _ in cells if label != SEARCH):
        for measure in (name for name in MEASURES if name != "busy"):
            ours = values(cells, label, OURS, measure)
            peers = {n: values(cells, label, n, measure) for n in SYSTEMS if not n.startswith(OURS) and n != "bare"}
            peers = {
                name: found for name, found in peers.items() if found and not (measure in SPENT and not any(found))
            }
            if not ours or not peers:
                continue
            pick = max if measure in HIGHER else min
            rival = pick(peers, key=lambda name: statistics.median(peers[name]))
            yield label, measure, ours, SYSTEMS[rival].title, peers[rival]


def values(cells: Cells, label: str, name: str, measure: str) -> list[float]:
    return [row[measure] for row in cells.get((label, name), []) if row[measure] is not None]


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("say which results: benchmarks/peers/page.py docs/results/peers.jsonl ['the command that made them']")
    said = sys.argv[2] if len(sys.argv) > 2 else "benchmarks/peers/plan.sh"
    print(write_page(Path(sys.argv[1]), said))
