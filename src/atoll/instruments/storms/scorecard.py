"""The scorecard of a storm: one run under faults against its fault-free twin.

steps_ratio_raw   learner steps per second of the storm over those of the twin.
steps_ratio       the same per second of learner time that the plan left: what it took on purpose is taken off the
                  storm's time. Forgiven are a freeze and an absence (for as long as they were planned), the lost share
                  1 - 1/f of a learner that was slowed by f, and the time of guests is added. A kill forgives nothing
                  (starting again is our cost), and neither does anything that happens to a link, the disk or the data.
loss_ratio        held-out loss of the published model over the twin's, after equal tokens.
"""

from __future__ import annotations

import itertools
import json
import signal
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from atoll.core import step_factor_min
from atoll.errors import LaunchError
from atoll.instruments.chaos import STANDBY, SYNCER, role_of
from atoll.instruments.storms.checks import RunFacts, check_run
from atoll.instruments.storms.recovery_times import PutIn, faults_of, recovery_times
from atoll.launch import TrainConfig
from atoll.learner import EXIT_NOT_HANDED_OVER
from atoll.observe import events as ev
from atoll.observe import read_events, report_begin_ns
from atoll.syncer import EXIT_FENCED

LEDGER = "I3"
VIOLATIONS_MAX = 100
KILLED_NS = 30 * 10**9
"""A killed process is seen dead within a tick of the launcher; on a machine with too much to do, later."""


@dataclass(frozen=True, slots=True)
class RunPace:
    """How much a run did, and in how much time."""

    steps: int
    window_s: float
    learner_s: float
    """Learner time that the plan left."""
    taken_s: float
    """Learner time that the plan took away on purpose."""
    added_s: float
    """Learner time of guests."""

    @property
    def raw(self) -> float:
        return self.steps / self.window_s if self.window_s > 0 else 0.0

    @property
    def fair(self) -> float:
        return self.steps / self.learner_s if self.learner_s > 0 else 0.0


def measure_pace(stamped: Sequence[tuple[int, str, ev.Event]], learners: int) -> RunPace:
    """From the beginning of the first step of any learner to the end of the last one."""
    reports = [(t_ns, event) for t_ns, _, event in stamped if isinstance(event, ev.LearnerSteps)]
    if not reports:
        return RunPace(0, 0.0, 0.0, 0.0, 0.0)
    begin_ns = min(report_begin_ns(t_ns, event) for t_ns, event in reports)
    end_ns = max(t_ns for t_ns, _ in reports)
    window_s = (end_ns - begin_ns) / 1e9
    faults = faults_of(stamped)
    taken_s = sum(_taken_s(faults, learner, begin_ns, end_ns) for learner in {fault.target for fault in faults})
    added_s = sum(_within_s(f, begin_ns, end_ns) for f in faults if f.kind == "join")
    steps = sum(event.steps for _, event in reports)
    return RunPace(steps, window_s, learners * window_s - taken_s + added_s, taken_s, added_s)


def _within_s(fault: PutIn, begin_ns: int, end_ns: int) -> float:
    """Seconds of a fault inside the window; no more than were planned."""
    seconds = max(0, min(fault.end_ns, end_ns) - max(fault.begin_ns, begin_ns)) / 1e9
    return min(seconds, fault.lasts_s) if fault.lasts_s else seconds


def _taken_s(faults: Sequence[PutIn], target: str, begin_ns: int, end_ns: int) -> float:
    """What the plan took of one learner's time: where faults overlap, the one that takes most counts."""
    shares = [
        (fault, 1.0 if fault.kind in ("freeze", "away") else 1.0 - 1.0 / max(1.0, fault.amount))
        for fault in faults
        if fault.target == target and role_of(target) == "learner" and fault.kind in ("freeze", "away", "slow")
    ]
    spans = []
    for fault, share in shares:
        start_ns = max(fault.begin_ns, begin_ns)
        spans.append((start_ns, start_ns + int(_within_s(fault, begin_ns, end_ns) * 1e9), share))
    edges = sorted({edge for start, stop, _ in spans for edge in (start, stop)})
    taken_ns = 0.0
    for left, right in itertools.pairwise(edges):
        most = max((share for start, stop, share in spans if start <= left and stop >= right), default=0.0)
        taken_ns += most * (right - left)
    return taken_ns / 1e9


def build_scorecard(config: TrainConfig, storm: Path, twin: Path, *, seed: int, minutes: float) -> dict[str, Any]:
    """Everything that the storm showed, as one object. Both runs must have come to their end."""
    stamped, calm = list(read_events(storm)), list(read_events(twin))
    result, twin_result = _result(storm), _result(twin)
    pace, twin_pace = measure_pace(stamped, config.learners), measure_pace(calm, config.learners)
    checked = check_run(storm, run_facts(config))
    violations = checked.violations
    kinds = Counter(event.fault for _, _, event in stamped if isinstance(event, ev.FaultInjected))
    skipped = [asdict(event) for _, _, event in stamped if isinstance(event, ev.FaultSkipped)]
    return {
        "faults": sum(kinds.values()),
        "fault_kinds": dict(sorted(kinds.items())),
        "faults_skipped": skipped,
        "steps_ratio": _ratio(pace.fair, twin_pace.fair),
        "steps_ratio_raw": _ratio(pace.raw, twin_pace.raw),
        "loss_ratio": _ratio(result["eval_loss"], twin_result["eval_loss"]),
        "loss": result["eval_loss"],
        "loss_twin": twin_result["eval_loss"],
        "goodput": result["goodput"],
        "goodput_twin": twin_result["goodput"],
        "ledger_exact": not any(violation.invariant == LEDGER for violation in violations),
        "violations": [str(violation) for violation in violations[:VIOLATIONS_MAX]],
        "liveness_judged": checked.liveness_judged,
        "replay": checked.replay,
        "recovery_s": recovery_times(stamped),
        "learners": config.learners,
        "minutes": minutes,
        "seed": seed,
        "namespaces": config.namespaces,
        "rate_mbit": config.rate_mbit,
        "steps": pace.steps,
        "steps_twin": twin_pace.steps,
        "wall_s": pace.window_s,
        "wall_s_twin": twin_pace.window_s,
        "taken_s": pace.taken_s,
        "added_s": pace.added_s,
        "tokens": result["tokens"],
        "tokens_merged": result["tokens_merged"],
        "tokens_pending": result["tokens_pending"],
        "tokens_discarded": result["tokens_discarded"],
        "refused": _refusals(stamped),
        "failed": failed_processes(stamped),
        "restarts": result["restarts"],
        "syncer_restarts": result["syncer_restarts"],
        "run": str(storm),
        "twin": str(twin),
    }


def failed_processes(stamped: Sequence[tuple[int, str, ev.Event]]) -> list[str]:
    """Processes that ended with an error which no fault of the plan explains. A syncer that was overtaken while it was
    frozen or cut off ends by itself, as it shall."""
    kills = [(t_ns, e.target) for t_ns, _, e in stamped if isinstance(e, ev.FaultInjected) and e.fault == "kill"]
    failed = []
    for t_ns, _, event in stamped:
        if not isinstance(event, ev.ProcessExited) or event.code in (0, EXIT_NOT_HANDED_OVER):
            continue
        names = (SYNCER, STANDBY) if event.role == SYNCER else (event.id,)
        near = [one for one in kills if one[1] in names and 0 <= t_ns - one[0] <= KILLED_NS]
        if event.code == -signal.SIGKILL and near:
            kills.remove(near[0])
        elif not (event.role == SYNCER and event.code == EXIT_FENCED):
            failed.append(f"{event.id} ({event.code})")
    return failed


def run_facts(config: TrainConfig) -> RunFacts:
    return RunFacts(
        learners=[f"learner-{number}" for number in range(config.learners)],
        fragments=config.sync.fragments,
        sync_every=config.sync.sync_every,
        step_s=config.step_ms / 1000.0,
        tokens_per_step=config.batch * config.seq,
        outlier_factor=config.sync.norm_outlier_factor,
        step_factor_min=step_factor_min(config.sync),
        share_max=config.sync.share_max,
    )


def _refusals(stamped: Sequence[tuple[int, str, ev.Event]]) -> dict[str, int]:
    codes: defaultdict[str, int] = defaultdict(int)
    for _, _, event in stamped:
        if isinstance(event, ev.ContributionRefused):
            codes[event.code] += 1
    return dict(sorted(codes.items()))


def _ratio(value: float | None, other: float | None) -> float | None:
    return value / other if value is not None and other else None


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise LaunchError(
            f"{folder} holds no finished run ({error}); give the folder of one that came to its end"
        ) from error
    assert isinstance(result, dict)
    if not result.get("finished", True):
        raise LaunchError(f"the run in {folder} was stopped ({result.get('reason')}); give one that came to its end")
    return result
