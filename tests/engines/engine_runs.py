"""What the tests of all engines share: a small script, a look at a run folder, and processes that must not stay."""

from __future__ import annotations

from pathlib import Path

from atoll.observe import events as ev
from atoll.observe import read_events

TESTS = Path(__file__).parents[1]
SCRIPT = f"""
import pathlib, sys, time, torch
sys.path.append({str(TESTS)!r})
import atoll
from cluster import small_model
torch.set_num_threads(1)
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
finish = pathlib.Path(sys.argv[1])
with atoll.Learner(model, optimizer) as learner:
    while not learner.done and not finish.exists():
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.05)
        learner.step(tokens=8)
print("the script has ended")
"""


def happenings(run: Path, kind: type[ev.Event]) -> list[ev.Event]:
    if not any(run.glob("events/*.jsonl")):
        return []
    return [event for _, _, event in read_events(run) if isinstance(event, kind)]


def commits(run: Path) -> int:
    return len(happenings(run, ev.Committed))


def contributors(run: Path, after: int = 0) -> set[str]:
    """Who is in the commits that followed the first so many."""
    return {learner for event in happenings(run, ev.Committed)[after:] for learner in event.contributors}


def changes(run: Path, learner: str) -> list[tuple[str, str]]:
    """What became of a learner: (state, reason) in order."""
    return [(e.state, e.reason) for e in happenings(run, ev.MemberChanged) if e.learner == learner]


def processes(job: str) -> list[str]:
    """The command lines of a job's processes on this machine, wherever they hang: they carry its mark."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"\0ATOLL_PART={job}/".encode() in b"\0" + environ.read_bytes():
                stat = (environ.parent / "stat").read_text().rpartition(")")[2].split()[0]
                line = (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found += [line] if stat not in ("Z", "X") else []
        except OSError:
            continue
    return found
