"""Before a syncer serves: whose run it continues, under which epoch, and what it says where there is none to continue.

The ladder is `recover`'s; below it are the learners (core.beginning). A run that had versions begins with a newcomer's
random parameters only by the operator's word, --new-run. A syncer that finds nothing at all cannot know: somebody may
have deleted its folder. So it is in doubt, and newcomers wait some seconds, unless --new-run says that there is nobody
to wait for. A launcher that has just made the folder says so with --first-start, which gives up nothing that was there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atoll.core import EPOCH_KEY, EPOCHS_SKIPPED, Begin, Recovery, heal_wait
from atoll.errors import FencedSyncerError, StoreError
from atoll.observe import Writer, events
from atoll.private import redacted
from atoll.store import Hold, RunStore, SnapshotTarget
from atoll.syncer.options import SyncerOptions
from atoll.syncer.recover import first_line, recover
from atoll.syncer.state import Stored

EPOCHS_ROW = "epochs_skipped"
EVENTS_BYTES_MAX = 64 << 20
"""Of each file of events that is searched for the beginning of a run: some hours of waiting for the first learner."""
SEARCH_BYTES = 1 << 20
_BEGUN = (b'"layout_fixed"', b'"syncer_recovered"')
"""Kinds of events that a syncer emits once its run has versions."""


def claim_location(options: SyncerOptions, target: SnapshotTarget | None, store: RunStore | None) -> Hold | None:
    """Claim the snapshot location before anything is read from it. One that cannot be reached is claimed later: if the
    state is whole without it, the run goes on."""
    if target is None:
        return None
    try:
        return target.claim(
            epoch=store.epoch if store is not None else 1, take_over=options.take_over or options.standby, say=tell
        )
    except OSError as error:
        tell(f"{target.url} cannot be claimed ({first_line(error)}); until it can be, another syncer may write there")
        return target.claim_later(0)


def find(
    options: SyncerOptions, store: RunStore | None, target: SnapshotTarget | None
) -> tuple[tuple[Recovery, Stored] | None, list[str]]:
    """What is left of the run, if anything, and what was wrong with the rest."""
    problems: list[str] = []
    return recover(store, target, options.durability, problems, begin_anew=options.new_run), problems


def how_to_begin(
    options: SyncerOptions, found: Recovery | None, problems: Sequence[str], hold: Hold | None, writer: Writer
) -> Begin:
    """What the machine must know before the first Hello. Says what the operator should hear, and raises StoreError if
    there is nothing to continue and --must-continue was given."""
    if found is not None:
        if options.new_run:
            tell("there is a state to continue, so no new run begins; for one give another --run-folder or --snapshots")
        return Begin(new_run=options.new_run)
    for problem in problems:
        _warn(problem, writer)
    if options.must_continue:
        let_go(hold)
        raise StoreError(f"{_nothing_found(options)}, and --must-continue was given; correct them, or leave it away")
    if options.new_run:
        return Begin(new_run=True)
    had_versions = _had_versions(options, problems, hold)
    if options.first_start and not had_versions:
        tell(f"{_nothing_found(options)}; a new run begins")
        return Begin()
    doubt = _nothing_found(options)
    if had_versions:
        tell(
            f"{_nothing_found(options)}, but the run had versions ({had_versions}); waiting for a learner that holds "
            "it. If none is left, begin anew with --new-run"
        )
    elif options.snapshots:
        doubt = f"no snapshot found at {redacted(options.snapshots)}"
        _warn(
            f"{doubt}; this begins a new run, once learners that hold an earlier one have had {heal_wait()} to say "
            "hello (to continue one, give the --snapshots that it had; --must-continue makes this an error; --new-run "
            "begins at once)",
            writer,
        )
    expected = options.config.get("learners_expected", 0) if isinstance(options.config, Mapping) else 0
    said = bool(options.snapshots) and not had_versions
    return Begin(had_versions=had_versions, doubt=doubt, said=said, learners=int(expected))


def epoch_of(store: RunStore | None, found: Recovery | None, hold: Hold | None, *, take_over: bool) -> int:
    """This syncer's epoch: the state folder's, counted on from the snapshot's if the folder before it was lost, from
    what learners had seen, and from the claim on the snapshot location. Learners must never see one twice."""
    own = store.epoch if store is not None else 1
    rows: Mapping[str, Any] = found.rows if found is not None else store.rows() if store is not None else {}
    skipped = found.epoch + EPOCHS_SKIPPED if found is not None and found.epoch else int(rows.get(EPOCHS_ROW, 0))
    epoch = max(own + skipped, int(rows.get(EPOCH_KEY, 0)) + 1)
    if found is not None and not found.epoch and not take_over:
        _check_newest(found, hold, epoch)
    if hold is not None and hold.taken:
        epoch = max(epoch, hold.claim.number)
    if store is not None and epoch != own + int(rows.get(EPOCHS_ROW, 0)):
        store.remember({EPOCHS_ROW: epoch - own})
    return epoch


def _check_newest(found: Recovery, hold: Hold | None, epoch: int) -> None:
    """The state of this folder is old news if another syncer has gone on from a snapshot of it since."""
    before = hold.before if hold is not None else None
    if before is None or before.epoch < epoch or before.run not in ("", str(found.rows["run"]["run"])):
        return
    let_go(hold)
    assert hold is not None
    raise StoreError(
        f"another syncer ({before.holder}) has gone on with this run at {hold.place.url} since this folder's state was "
        "written; start with an empty --run-folder to continue from its snapshots, or with --take-over to go on from "
        "the older state"
    )


def let_go(hold: Hold | None) -> None:
    """This syncer will not serve: the next one need not watch its claim."""
    if hold is not None and hold.taken:
        with contextlib.suppress(OSError, FencedSyncerError):
            hold.renew(hold.claim.run, hold.claim.epoch, begun=hold.claim.begun, ended=True)


def tell(text: str) -> None:
    print(f"atoll syncer: {text}", flush=True)


def _warn(text: str, writer: Writer) -> None:
    tell(text)
    writer.emit(events.Warned("syncer", text))


def _nothing_found(options: SyncerOptions) -> str:
    places = [f"no state in {options.run_folder / 'state'}"] if options.run_folder is not None else []
    places += [f"no snapshot found at {redacted(options.snapshots)}"] if options.snapshots else []
    return " and ".join(places) or "neither --run-folder nor --snapshots was given"


def _had_versions(options: SyncerOptions, problems: Sequence[str], hold: Hold | None) -> str:
    """How it is known that there was more than is left; empty if it is not."""
    if problems:
        return problems[0]
    if hold is not None and hold.before is not None and hold.before.begun:
        return f"{redacted(options.snapshots)} was claimed for run {hold.before.run}, which had"
    return _traces(options.run_folder) if options.run_folder is not None else ""


def _traces(folder: Path) -> str:
    if (folder / "model.safetensors").exists():
        return f"{folder} holds its model.safetensors"
    for path in sorted((folder / "events").glob("syncer-*.jsonl")):
        if _tells_of_versions(path):
            return f"{path} tells of them"
    return ""


def _tells_of_versions(path: Path) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        before = b""
        while file.tell() < EVENTS_BYTES_MAX and (data := file.read(SEARCH_BYTES)):
            if any(kind in before + data for kind in _BEGUN):
                return True
            before = data[-32:]
    return False
