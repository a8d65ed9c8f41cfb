"""One snapshot location, several syncers: who may write there, and what nobody deletes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from store_helpers import arrays_of, meta_of, rows_at

from atoll.errors import FencedSyncerError, StoreError
from atoll.store import Hold, SnapshotTarget, claim
from atoll.store.claim import later_claim
from atoll.store.remote_folder import RemoteFolder
from atoll.store.snapshots import LABELS_PER_EPOCH

WATCH_S = 0.5


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "CLAIM_LOOK_S", 0.02)
    monkeypatch.setattr(claim, "CLAIM_PAUSE_S", 0.05)


@pytest.fixture(params=["folder", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "snapshots") if request.param == "folder" else f"memory://{uuid.uuid4()}"


def take(url: str, *, take_over: bool = False, epoch: int = 1, said: list[str] | None = None) -> Hold:
    say = said.append if said is not None else lambda text: None
    return SnapshotTarget(url).claim(epoch=epoch, take_over=take_over, say=say, watch_s=WATCH_S)


@pytest.fixture
def beating() -> Iterator[list[Hold]]:
    """Claims that are renewed as those of a living syncer are."""
    holds: list[Hold] = []
    over = threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            for hold in list(holds):
                hold.renew("r1", hold.claim.epoch, begun=True)

    thread = threading.Thread(target=beat)
    thread.start()
    yield holds
    over.set()
    thread.join()


def test_a_living_claim_is_refused_with_the_remedy(url: str, beating: list[Hold]) -> None:
    first = take(url)
    beating.append(first)
    with pytest.raises(StoreError, match=rf"epoch 1, process {os.getpid()} on .*--take-over"):
        take(url)
    first.check()


def test_a_claim_that_stands_still_is_taken_and_its_maker_is_fenced(url: str) -> None:
    first = take(url)
    said: list[str] = []
    second = take(url, said=said)
    assert "watching" in said[0] and second.claim.number == 2 and second.before is not None
    for look in (first.check, lambda: first.renew("r1", 1, begun=True)):
        with pytest.raises(FencedSyncerError, match=r"newer syncer.*epoch 2"):
            look()
    second.check()


def test_take_over_does_not_ask_and_counts_on_from_the_epoch_that_was_claimed(url: str, beating: list[Hold]) -> None:
    first = take(url)
    first.renew("r1", 1005, begun=True)
    second = take(url, take_over=True)
    assert second.claim.number == 1006
    with pytest.raises(FencedSyncerError):
        first.check()


def test_a_syncer_that_ended_in_order_leaves_nothing_to_watch(url: str) -> None:
    first = take(url)
    first.renew("r1", 7, begun=True, ended=True)
    said: list[str] = []
    second = take(url, said=said)
    assert said == [] and second.claim.number == 8
    assert second.before is not None and second.before.run == "r1" and second.before.begun


DYING = """
import sys
from atoll.store import SnapshotTarget
SnapshotTarget(sys.argv[1]).claim(epoch=4, take_over=False, say=print)
"""


def test_a_process_of_this_machine_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DYING, str(tmp_path)], check=True)
    said: list[str] = []
    assert take(str(tmp_path), said=said).claim.number == 5 and said == []


def test_of_many_at_once_one_keeps_it(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def try_it(_: int) -> Hold | None:
        together.wait()
        try:
            return take(str(tmp_path), take_over=True)
        except StoreError:
            return None

    def overtaken(hold: Hold) -> bool:
        try:
            hold.check()
        except FencedSyncerError:
            return True
        return False

    with ThreadPoolExecutor(8) as pool:
        holds = [hold for hold in pool.map(try_it, range(8)) if hold is not None]
    assert len([hold for hold in holds if not overtaken(hold)]) == 1
    assert len({hold.claim.number for hold in holds}) == len(holds)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}, "temporary files are tidied away"


def test_a_number_that_was_taken_is_not_free_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing misses what came while it was read, when what it would have shown instead went in that time."""
    for _ in range(3):
        newest = take(url, take_over=True)
    listed = RemoteFolder.sizes

    def misses_the_newest(place: RemoteFolder, folder: str) -> dict[str, int]:
        return {name: size for name, size in listed(place, folder).items() if name <= "claim-000000000001.json"}

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFolder, "sizes", misses_the_newest)
        with pytest.raises(FencedSyncerError):
            later_claim(RemoteFolder(url), 1).renew("r1", 1, begun=False)
    newest.check()


def test_old_claims_are_tidied_away(url: str) -> None:
    for _ in range(claim.CLAIMS_KEPT + 3):
        newest = take(url, take_over=True)
    names = sorted(RemoteFolder(url).sizes(""))
    assert len(names) == claim.CLAIMS_KEPT and names[-1] == f"claim-{newest.claim.number:012}.json"


@pytest.mark.parametrize("rival", [False, True])
def test_where_the_place_cannot_refuse_a_second_writer_what_was_written_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival: bool
) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError("this file system has no links")

    monkeypatch.setattr(os, "link", no_links)
    name = tmp_path / "claim-000000000001.json"

    def later(seconds: float) -> None:
        if rival:
            name.write_text('{"instance": "another", "host": "elsewhere", "pid": 7}')

    monkeypatch.setattr(claim.time, "sleep", later)
    if rival:
        with pytest.raises(StoreError, match="at the same moment"):
            take(str(tmp_path))
    else:
        take(str(tmp_path)).check()
        assert name.exists()


def test_a_claim_that_cannot_be_read_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "claim-000000000009.json").write_bytes(b"\xff{")
    said: list[str] = []
    assert take(str(tmp_path), said=said).claim.number == 10
    assert "an unknown host" in said[0]


def test_a_claim_counts_on_from_snapshots_of_older_versions_that_made_no_claims(tmp_path: Path) -> None:
    write(SnapshotTarget(str(tmp_path)), 1003 * LABELS_PER_EPOCH + 4)
    assert take(str(tmp_path), epoch=2).claim.number == 1004


def test_a_place_that_could_not_be_reached_is_claimed_later_unless_somebody_newer_did(tmp_path: Path) -> None:
    late = SnapshotTarget(str(tmp_path)).claim_later(0)
    late.renew("r1", 3, begun=True)
    assert late.taken and late.claim.number == 3
    overtaken = SnapshotTarget(str(tmp_path)).claim_later(0)
    with pytest.raises(FencedSyncerError):
        overtaken.renew("r1", 3, begun=True)
    assert not overtaken.taken


# ---------------------------------------------------------------- keep


def write(target: SnapshotTarget, label: int, run: str = "r1") -> None:
    draft = target.begin(label)
    draft.put_fragment(0, 1, arrays_of(0, 1), meta_of(0, 1))
    draft.finish(rows_at(1), {"run": run})


def labels(epoch: int, *numbers: int) -> list[int]:
    return [epoch * LABELS_PER_EPOCH + number for number in numbers]


def test_snapshots_of_an_older_epoch_stay_until_this_one_has_enough_of_its_own(url: str) -> None:
    target = SnapshotTarget(url, keep=2)
    for label in labels(1, 1, 2, 3):
        write(target, label)
    target.begin(labels(1, 4)[0]).put_fragment(0, 1, arrays_of(0, 1), {})  # the older one is writing it
    write(target, labels(2, 1)[0])
    assert target._labels() == labels(1, 2, 3, 4) + labels(2, 1)
    write(target, labels(2, 2)[0])
    assert target._labels() == labels(2, 1, 2)


def test_an_older_epoch_that_goes_on_deletes_nothing_of_a_newer_one(url: str) -> None:
    old, new = SnapshotTarget(url, keep=1), SnapshotTarget(url, keep=1)
    write(old, labels(1, 1)[0])
    write(new, labels(2, 1)[0])
    assert old._retain(labels(1, 1)[0], "r1") == ([], [])
    assert old._labels() == labels(2, 1)
    write(new, labels(2, 2)[0])
    assert new._labels() == labels(2, 2)


def test_short_lives_do_not_fill_the_place(url: str) -> None:
    for epoch in range(1, 9):
        write(SnapshotTarget(url, keep=2), labels(epoch, 1)[0])
    assert SnapshotTarget(url)._labels() == [*labels(6, 1), *labels(7, 1), *labels(8, 1)]


def test_what_another_run_wrote_is_left_alone(url: str) -> None:
    write(SnapshotTarget(url, keep=1), labels(1, 1)[0], run="other")
    for number in (1, 2, 3):
        write(SnapshotTarget(url, keep=1), labels(2, number)[0], run="r1")
    assert SnapshotTarget(url)._labels() == labels(1, 1) + labels(2, 3)
