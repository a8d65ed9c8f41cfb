"""The invariants of a run of real processes, checked afterwards: its events and tape, told to the checkers as facts.

A process that is killed takes its last words with it: up to 0.2 s of events, and the notes on the tape since its last
sync. So a version that nobody wrote down, but that the next syncer found on its disk, is taken for made; every other
gap is a violation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core import Discard, Refusal
from atoll.errors import AtollError
from atoll.instruments.check import Checkers, Violation, all_checkers, facts
from atoll.observe import events as ev
from atoll.observe import read_events
from atoll.store import FILE_BYTES_MAX, read_records, tape_files

LOST_STEPS = 16
"""Steps that a killed process may have told the syncer but not its event file, or the other way round: 0.2 s between
two writes of events, some 0.25 s between two reports, at the pace of a fast model."""
CALM_S = 20.0
"""Besides three sync periods: how long the run has to recover after its last fault. A process is back within some 10 s
on two busy cores."""
TOKENS_MAX = 2**63
"""What one that lies may have the syncer believe."""
ACCEPTED = ("accepted", "late")
IN_ORDER = ("finished", "SIGTERM", "SIGINT")
"""Reasons of a LearnerFinished that was no error. It has handed everything over unless it says otherwise: then the
syncer may not know of its last steps."""

Stamped = tuple[int, str, ev.Event]
Key = tuple[int, int, int]
"""epoch, fragment, version"""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the checks need to know of a run besides its events."""

    learners: Sequence[str]
    fragments: int
    sync_every: int
    step_s: float
    tokens_per_step: int
    outlier_factor: float = 10.0
    step_factor_min: float = 1.0
    share_max: float = 1.0


@dataclass(slots=True)
class _Merge:
    """What is known of one version, from the tape, the events, or both."""

    checksum: int = 0
    contributions: tuple[facts.Identity, ...] = ()
    tokens: int = 0
    durable: bool = False
    weights: tuple[float, ...] = ()
    share: float = 1.0


@dataclass(slots=True)
class _Epoch:
    """One syncer of the run."""

    number: int
    started_ns: int
    restored: ev.SyncerRecovered | None = None
    healed: list[ev.FragmentHealed] = field(default_factory=list)
    commits: list[ev.Committed] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checked:
    """What the checks of a run came to."""

    violations: list[Violation]
    liveness_judged: bool
    """False if the run ended too soon after its last fault to say whether it recovered."""
    replay: str
    """identical, different, or why it could not be followed."""


def check_run(folder: Path, run: RunFacts) -> Checked:
    """Every violation of an invariant that the folder of a finished run shows."""
    stamped = list(read_events(folder))
    checkers = all_checkers(
        outlier_factor=run.outlier_factor,
        sync_every=run.sync_every,
        step_factor_min=run.step_factor_min,
        share_max=run.share_max,
    )
    _feed_versions(checkers, stamped, folder / "state", run)
    for fact in _of_learners(stamped):
        checkers.feed(fact)
    for fact in _of_ledger(stamped, run):
        checkers.feed(fact)
    calm = list(_of_calm(stamped, run))
    for fact in calm:
        checkers.feed(fact)
    replayed, said = _replayed(folder)
    for fact in replayed:
        checkers.feed(fact)
    return Checked([*checkers.violations, *_model(folder)], _judged(calm), said)


def _judged(calm: Sequence[facts.Fact]) -> bool:
    quiet = [fact for fact in calm if isinstance(fact, facts.Calm)]
    ended = [fact for fact in calm if isinstance(fact, facts.Ended)]
    return bool(quiet and ended) and ended[0].at_ns >= quiet[0].until_ns


def _replayed(folder: Path) -> tuple[list[facts.Fact], str]:
    """Every merge done again from the recording."""
    from atoll.instruments.replay import replay

    try:
        report = replay(folder)
    except AtollError as error:
        return [], f"not possible: {error}"
    if report.mismatch is not None:
        wrong = report.mismatch
        return [facts.Replayed(wrong.fragment, wrong.version, wrong.expected, wrong.found)], "different"
    ends = [facts.Replayed(e.fragment, e.version, e.checksum, e.found_checksum) for e in report.ends if e.checksum]
    if report.identical:
        return [*ends], f"identical ({report.merges} merges)"
    return [], f"followed as far as it was recorded ({report.merges} merges)"


# ---------------------------------------------------------------- versions


def _feed_versions(checkers: Checkers, stamped: Sequence[Stamped], state: Path, run: RunFacts) -> None:
    """The life of every fragment, syncer by syncer."""
    epochs = _epochs(stamped)
    known = _merges(state, epochs)
    norms = {
        (e.fragment, e.learner, e.generation, e.seq): (e.norm, e.steps)
        for _, _, e in stamped
        if isinstance(e, ev.ContributionReceived)
    }
    heads: dict[int, int] = {}  # checksum of the run's newest version, by fragment
    newest: dict[int, int] = {}
    for epoch in epochs:
        checkers.feed(facts.Opened(epoch.number))
        found = _found(epoch)
        for fragment in range(run.fragments):
            version = found.get(fragment, newest.get(fragment, -1) if fragment in newest else 0)
            if fragment not in newest:
                checkers.feed(facts.Committed(epoch.number, fragment, 0, 0))
                newest[fragment], heads[fragment] = 0, 0
            if version > newest[fragment]:
                _feed_unwritten(checkers, epoch.number, fragment, range(newest[fragment] + 1, version + 1))
                newest[fragment], heads[fragment] = version, 0
        if epoch.restored is not None:
            back = {f: (v, heads[f] if v == newest[f] else _checksum(known, f, v)) for f, v in found.items()}
            checkers.feed(facts.Restored(epoch.number, back, epoch.restored.exact))
            newest.update(found)
            heads.update({fragment: checksum for fragment, (_, checksum) in back.items()})
        _feed_epoch(checkers, epoch, known, norms, newest, heads)


def _feed_epoch(
    checkers: Checkers,
    epoch: _Epoch,
    known: dict[Key, _Merge],
    norms: dict[tuple[int, str, int, int], tuple[float, int]],
    newest: dict[int, int],
    heads: dict[int, int],
) -> None:
    for heal in epoch.healed:
        checksum = _checksum(known, heal.fragment, heal.version)
        checkers.feed(facts.Healed(epoch.number, heal.fragment, heal.version, checksum))
        newest[heal.fragment], heads[heal.fragment] = heal.version, checksum
    for _, fragment, version in sorted(key for key in known if key[0] == epoch.number):
        merge = known[epoch.number, fragment, version]
        sizes = [norms.get((fragment, *identity)) for identity in merge.contributions]
        whole = [size for size in sizes if size is not None]
        told = len(whole) == len(sizes)
        checkers.feed(
            facts.Committed(
                epoch.number,
                fragment,
                version,
                merge.checksum,
                contributions=merge.contributions,
                tokens=(merge.tokens,),
                norms=tuple(norm for norm, _ in whole) if told else (),
                steps=tuple(steps for _, steps in whole) if told else (),
                weights=merge.weights if told and len(merge.weights) == len(whole) else (),
                share=merge.share,
            )
        )
        if merge.durable:
            checkers.feed(facts.Durable(epoch.number, fragment, version))
            checkers.feed(facts.Told(epoch.number, fragment, version, merge.checksum))
        newest[fragment], heads[fragment] = version, merge.checksum


def _feed_unwritten(checkers: Checkers, epoch: int, fragment: int, versions: Iterable[int]) -> None:
    """Versions of a syncer that was killed before it could write down that it had made them."""
    for version in versions:
        checkers.feed(facts.Committed(epoch, fragment, version, 0))


def _checksum(known: dict[Key, _Merge], fragment: int, version: int) -> int:
    found = [merge.checksum for (_, f, v), merge in known.items() if (f, v) == (fragment, version)]
    return found[-1] if found else 0


def _found(epoch: _Epoch) -> dict[int, int]:
    return dict(enumerate(epoch.restored.versions)) if epoch.restored is not None else {}


def _epochs(stamped: Sequence[Stamped]) -> list[_Epoch]:
    """Each syncer has an event file of its own; what is in it is its. One that leads shards may begin anew in it, with
    the next epoch."""
    epochs: list[_Epoch] = []
    by_source: dict[str, _Epoch] = {}
    early: dict[str, ev.SyncerRecovered] = {}
    for t_ns, source, event in stamped:
        if isinstance(event, ev.SyncerStarted):
            by_source[source] = _Epoch(event.epoch, t_ns, early.pop(source, None))
            epochs.append(by_source[source])
        elif isinstance(event, ev.SyncerRecovered):
            if source in by_source:
                by_source[source].restored = event
            else:
                early[source] = event
        elif isinstance(event, ev.FragmentHealed) and source in by_source:
            by_source[source].healed.append(event)
        elif isinstance(event, ev.Committed) and source in by_source:
            by_source[source].commits.append(event)
    return sorted(epochs, key=lambda epoch: epoch.number)


def _merges(state: Path, epochs: Sequence[_Epoch]) -> dict[Key, _Merge]:
    """Every version that a tape or an event tells of. An epoch that is known only by its tape never served."""
    known: defaultdict[Key, _Merge] = defaultdict(_Merge)
    for file in tape_files(state / "tape"):
        if file.path.stat().st_size > FILE_BYTES_MAX:
            continue
        records, _ = read_records(file.path.read_bytes())
        for note in (record["note"] for record in records if "note" in record):
            if "merge" in note:
                merge = known[file.epoch, int(note["merge"]), int(note["version"])]
                merge.checksum = int(note["checksum"])
                merge.contributions = tuple((str(a), int(b), int(c)) for a, b, c in note["contributions"])
    for epoch in epochs:
        for event in epoch.commits:
            merge = known[epoch.number, event.fragment, event.version]
            merge.checksum, merge.tokens = event.checksum, event.tokens
            merge.durable = event.store_bytes > 0
            merge.weights, merge.share = tuple(event.weights), event.share
    return dict(known)


# ---------------------------------------------------------------- learners, ledger, the end


def _of_learners(stamped: Sequence[Stamped]) -> Iterator[facts.Fact]:
    codes = {str(code) for code in (*Refusal, *Discard)}  # what was left out of a merge names why it is discarded
    back_ns = [t for t, _, e in stamped if isinstance(e, ev.SyncerRecovered) and not e.exact]
    seen: dict[tuple[str, str, int], int] = {}
    for t_ns, source, event in stamped:
        if isinstance(event, ev.LearnerAdopted):
            key = (event.learner, source, event.fragment)
            if any(seen.get(key, t_ns) < back < t_ns for back in back_ns):
                yield facts.WentBack(*key)
            seen[key] = t_ns
            yield facts.Adopted(event.learner, source, event.fragment, event.version)
        elif isinstance(event, ev.ContributionRefused):
            yield facts.Refused(event.learner, event.code, event.code in codes)
        elif isinstance(event, ev.LearnerPushed) and event.outcome not in ACCEPTED:
            yield facts.Refused(event.learner, event.outcome, event.outcome in codes)


def _of_ledger(stamped: Sequence[Stamped], run: RunFacts) -> Iterator[facts.Fact]:
    """The sums of all fragments, as the syncer tells them once a second. What learners did is known to the token for
    those that left in order. Of those that did not, the syncer may know anything up to what they did: one that was cut
    off and then killed has taken its steps with it. Of one that lies it may believe anything; what that costs is I15's.
    """
    liars = _liars(stamped)
    steps: dict[str, int] = defaultdict(int)
    sure: dict[str, int] = {}
    for _, source, event in stamped:
        if isinstance(event, ev.SyncerStats):
            yield facts.Books(
                0, event.tokens_processed, event.tokens_merged, event.tokens_pending, dict(event.tokens_discarded)
            )
        elif isinstance(event, ev.LearnerSteps) and event.learner not in liars:
            steps[source] += event.tokens
        elif isinstance(event, ev.LearnerFinished) and event.reason in IN_ORDER and not event.unhanded:
            sure[source] = event.tokens if event.learner not in liars else 0
    killed = [tokens + LOST_STEPS * run.tokens_per_step for source, tokens in steps.items() if source not in sure]
    known = sum(sure.values())
    yield facts.Processed(known, known + sum(killed) if not liars else TOKENS_MAX)


def _liars(stamped: Sequence[Stamped]) -> set[str]:
    return {event.target for _, _, event in stamped if isinstance(event, ev.FaultInjected) and event.fault == "lie"}


def _of_calm(stamped: Sequence[Stamped], run: RunFacts) -> Iterator[facts.Fact]:
    """What is merged after the last fault. A learner that has lied is promised nothing: what its books say of it may
    keep it out for as long as its process lives."""
    ends = [t for t, _, e in stamped if isinstance(e, ev.FaultInjected | ev.FaultEnded)]
    steps = [t for t, _, e in stamped if isinstance(e, ev.LearnerSteps)]
    if not ends or not steps:
        return
    last_ns, end_ns = max(ends), max(steps)
    until_ns = last_ns + int((CALM_S + 3 * run.sync_every * run.step_s) * 1e9)
    promised = tuple(learner for learner in run.learners if learner not in _liars(stamped))
    yield facts.Calm(last_ns, until_ns, run.fragments, promised)
    for t_ns, _, event in stamped:
        if isinstance(event, ev.Committed) and t_ns >= last_ns:
            yield facts.Progressed(t_ns, fragment=event.fragment)
            for learner in event.contributors:
                yield facts.Progressed(t_ns, learner=learner)
    yield facts.Ended(end_ns)


def _model(folder: Path) -> list[Violation]:
    """The published model at the end must be there, and finite."""
    import numpy as np
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        return [Violation("I7", f"the published model {path} cannot be read ({error})")]
    bad = [name for name, values in tensors.items() if not np.isfinite(values).all()]
    return [Violation("I7", f"the published model holds NaN or Inf in {', '.join(bad)}")] if bad else []
