"""Recorded runs are made again, to the bit: through crashes, failing disks and restarts; what is damaged is named.

Most tests drive the syncer's real shell and store without a network (recorded_run.py); two run real processes that die
by SIGKILL in the middle of a commit.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from cluster import SyncerProcess, TrainingThread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded_run import Puppet, RecordedRun
from safetensors.numpy import load_file
from typer.testing import CliRunner

from atoll.app import app
from atoll.errors import AtollError, ConfigError, LaunchError, StoreError
from atoll.instruments.chaos import failpoints
from atoll.instruments.replay.recording_reader import SegmentReader
from atoll.instruments.replay.replay import ReplayReport, replay
from atoll.instruments.replay.tape_diff import diff_tapes
from atoll.launch import train_config
from atoll.launch.options import to_toml
from atoll.store import read_state, segment_files
from atoll.store.recording import FRAME, MARKER, head_checksum
from atoll.syncer import recording


def check_same(folder: Path) -> ReplayReport:
    """Everything is made again, and what comes out is the model that the run wrote, bit for bit."""
    report = replay(folder, export=folder / "again.safetensors")
    assert report.identical and report.mismatch is None and report.missing == []
    assert report.hash_found == report.hash_expected != ""
    again, model = load_file(folder / "again.safetensors"), load_file(folder / "model.safetensors")
    assert {name: (a.shape, a.tobytes()) for name, a in again.items()} == {
        name: (a.shape, a.tobytes()) for name, a in model.items()
    }
    assert all((end.version, end.checksum) == (end.found_version, end.found_checksum) for end in report.ends)
    return report


def segments(folder: Path) -> list[Path]:
    return [segment.path for segment in segment_files(folder / "state" / "recording")]


def edit_head(path: Path, kind: str, change: Callable[[dict[str, Any]], None], *, number: int = 0) -> int:
    """Forge the head of one record, checksum and all. The new head must not be longer. Returns where its body is."""
    (segment,) = (s for s in segment_files(path.parent) if s.path == path)
    with SegmentReader(segment) as reader:
        record = [r for r in reader.records() if r.kind == kind][number]
    change(record.head)
    room = record.body_offset - record.offset - FRAME.size
    head = json.dumps(record.head, separators=(",", ":")).encode()
    assert len(head) <= room
    head = head.ljust(room)
    data = bytearray(path.read_bytes())
    frame = FRAME.pack(MARKER, room, record.body_bytes, head_checksum(head, record.body_bytes)) + head
    data[record.offset : record.body_offset] = frame
    path.write_bytes(data)
    return record.body_offset


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


# ---------------------------------------------------------------- runs that are made again


@pytest.mark.parametrize("codec", ["int4", "fp32"])
def test_a_real_run_that_was_killed_in_a_commit_is_made_again_to_the_bit(tmp_path: Path, codec: str) -> None:
    point = {"int4": "slot.header.sync:20", "fp32": "tape.append.mid:60"}[codec]
    options = ("--learners", "2", "--sync-every", "4", "--fragments", "3", "--record")
    syncer = SyncerProcess(tmp_path, *options, "--codec-up", codec, "--codec-down", codec, ATOLL_FAILPOINT=point)
    threads = [TrainingThread(syncer.address, f"t{i}", seed=i, step_s=0.004) for i in range(2)]
    assert syncer.wait_dead() == -signal.SIGKILL
    syncer.again(ATOLL_FAILPOINT="")
    before = sum(fragment.version for fragment in read_state(tmp_path / "state").fragments.values())
    status = syncer.wait_for(lambda s: s["committed"] and sum(s["versions"]) > before + 6, "rounds go on")
    assert status["recording"] == "on"
    for thread in threads:
        thread.stop()
        assert thread.error is None, thread.error
    assert syncer.stop() == 0
    report = check_same(tmp_path)
    assert report.complete and report.epochs == 2 and report.merges == sum(end.version for end in report.ends)


@pytest.mark.parametrize(("up", "down"), [("int4", "int4"), ("bf16", "int8"), ("int8", "fp32")])
def test_several_crashes_and_all_codecs(tmp_path: Path, up: str, down: str) -> None:
    run = RecordedRun(tmp_path, codec_up=up, codec_down=down)
    for _ in range(3):
        run.live(7, crash=True)
    run.live(5)
    report = check_same(tmp_path)
    assert report.complete and report.epochs == 4


def test_merges_that_were_recorded_and_never_committed_are_not_history(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.live(6, crash=True)
    with failpoints.arm("slot.data.mid:1:eio"):
        published = run.live(6, crash=True)  # a dying disk: recorded and published, and never in a slot
    committed = {f: each.version for f, each in read_state(tmp_path / "state").fragments.items()}
    assert sum(published) >= sum(committed.values()) + 6
    cut = replay(tmp_path)
    assert cut.identical and cut.left_out >= 6 and {e.fragment: e.found_version for e in cut.ends} == committed
    run.live(6)  # learners bring back what they hold
    report = check_same(tmp_path)
    assert {jump.why for jump in report.jumps} == {"heal"} and not report.complete and report.left_out >= 6


def test_an_older_slot_takes_the_run_back_and_replay_follows(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    before = run.live(12)
    slots = next((tmp_path / "state").rglob("fragment-0001.slots"))
    newest = read_state(tmp_path / "state").fragments[1].arrays["momentum"].tobytes()[:64]
    flip(slots, slots.read_bytes().index(newest))
    run.puppets = [Puppet(number) for number in range(2)]  # nobody is left who holds the newest version
    assert run.live(6)[1] > before[1]
    report = check_same(tmp_path)
    assert report.complete and report.left_out == 1


DISKS = ("", "", "slot.data.mid:{}:eio", "slot.header.sync:{}-{}:eio", "tape.append.mid:{}-{}:enospc")
DISKS += ("tape.append.sync:{}-{}:eio",)
"""How the disk of one life fails, from which hit to which. Three of the four cost the recording something."""


@pytest.mark.parametrize("seed", [1, 3, 20, 75])
def test_whatever_the_lives_before_the_end_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(recording, "RECORD_RETRY_S", 0.0)
    dice = random.Random(seed)
    run = RecordedRun(tmp_path, seed=seed, codec_up=dice.choice(["int4", "fp32"]))
    run.live(2, crash=True)
    for _ in range(3):
        first = dice.randint(4, 30)
        plan = dice.choice(DISKS).format(first, first + dice.randint(0, 9))
        if dice.random() < 0.3:
            run.puppets = [Puppet(number, seed) for number in range(2)]
        with failpoints.arm(plan):
            run.live(dice.randint(1, 12), crash=True, record=dice.random() < 0.8)
    run.live(4)
    check_same(tmp_path)


def test_settings_may_change_with_a_restart(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.live(5, crash=True)
    run.live(5, outer_lr=0.3, codec_down="fp32")
    run.live(5, outer_momentum=0.9, codec_down="int8", codec_up="fp32", merge="mean")
    report = check_same(tmp_path)
    # An fp32 downlink keeps no residual, so that the next epoch's begins from zero: derived, like everything else.
    assert report.complete


def test_recording_may_begin_late_and_pause(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    first = run.live(4, record=False)
    run.live(4)
    report = check_same(tmp_path)
    assert sorted((j.fragment, j.before, j.version) for j in report.jumps) == [(f, -1, first[f]) for f in range(3)]
    run.live(6, record=False)
    run.live(4)
    jumps = check_same(tmp_path).jumps
    assert len(jumps) == 6 and all(jump.before >= 0 for jump in jumps[3:])
    run.live(4, record=False)
    report = replay(tmp_path)
    assert not report.identical and "was committed by epoch 5 and not recorded" in report.missing[0]


def test_a_full_disk_costs_the_recording_some_versions_and_the_run_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recording, "RECORD_RETRY_S", 0.0)
    run = RecordedRun(tmp_path)
    run.live(6, crash=True)
    with failpoints.arm("tape.append.mid:12-24:enospc"):
        run.live(30)
    report = check_same(tmp_path)
    assert report.jumps and {jump.why for jump in report.jumps} == {"gap"} and not report.complete
    said = capsys.readouterr().out
    assert "cannot be recorded ([Errno 28] No space left" in said and "every merge is recorded again" in said
    told = [json.loads(line) for path in (tmp_path / "events").iterdir() for line in path.open()]
    assert any(e["kind"] == "warned" and "cannot be recorded" in e["text"] for e in told)
    gap = records_of(tmp_path, "state", why="gap")[0].head
    with pytest.raises(StoreError, match="cannot be reached, because merges between rounds") as told_why:
        replay(tmp_path, gap["round"] - 1)
    for number in map(int, re.findall(r"(\d+) or (?:less|more)", str(told_why.value))):
        assert replay(tmp_path, number).identical


def commits(folder: Path) -> int:
    return sum(fragment.version for fragment in read_state(folder / "state").fragments.values())


def records_of(folder: Path, kind: str, **fields: Any) -> list[Any]:
    found = []
    for segment in segment_files(folder / "state" / "recording"):
        with SegmentReader(segment) as reader:
            found += [r for r in reader.records() if r.kind == kind and fields.items() <= r.head.items()]
    return found


def test_a_disk_that_stays_full_is_told_to_the_version(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    with failpoints.arm("tape.append.mid:40:enospc"):
        run.live(20, crash=True)
    report = replay(tmp_path)
    assert not report.identical and report.mismatch is None and report.merges > 0
    ends = {end.fragment: end for end in report.ends}
    for fragment, end in ends.items():
        told = [text for text in report.missing if text.startswith(f"fragment {fragment}:")]
        behind = end.found_version < end.version
        assert len(told) == behind and (not behind or f"{end.found_version + 1} to {end.version}" in told[0])


def test_until_gives_the_parameters_of_that_round(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.live(10)
    run.live(8)
    wanted = {
        r.head["round"]: (r.head["fragment"], r.head["version"], r.head["checksum"])
        for r in records_of(tmp_path, "merge")
    }
    state: dict[int, tuple[int, int]] = {}
    for number in sorted(wanted):
        fragment, version, checksum = wanted[number]
        state[fragment] = (version, checksum)
        if number % 5 == 0:
            report = replay(tmp_path, number, export=tmp_path / "at.safetensors")
            assert report.identical and report.hash_expected == "" and report.exported
            assert {e.fragment: (e.found_version, e.found_checksum) for e in report.ends} == state
    assert replay(tmp_path, max(wanted)).merges == len(wanted) >= 18
    first = replay(tmp_path, 0)
    assert first.merges == 0 and [end.found_version for end in first.ends] == [0, 0, 0]


# ---------------------------------------------------------------- damage


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs that nobody changes."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    run = RecordedRun(folder)
    run.live(7)
    run.live(6)
    return folder


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_cut_recording_is_followed_to_the_cut_or_refused(copy: Path, recorded: Path, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 1))
    path, whole = segments(copy)[index], segments(recorded)[index].read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    try:
        report = replay(copy)
        assert report.identical == (report.hash_found == report.hash_expected)
        assert report.identical == (cut == len(whole)) and report.mismatch is None
        assert report.identical or report.missing
    except StoreError as error:
        assert "first parameters" in str(error) or "not there" in str(error) or "no recording" in str(error)
    finally:
        path.write_bytes(whole)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_flipped_bit_is_found_or_harmless(copy: Path, recorded: Path, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, 1))
    path, whole = segments(copy)[index], segments(recorded)[index].read_bytes()
    flip(path, data.draw(st.integers(0, len(whole) - 1)))
    try:
        report = replay(copy)
        assert not report.identical and report.missing
    except StoreError:
        pass
    finally:
        path.write_bytes(whole)


def test_a_damaged_payload_is_named(copy: Path) -> None:
    path = segments(copy)[0]
    body = edit_head(path, "payload", lambda head: None, number=3)
    flip(path, body + 40)
    with pytest.raises(
        StoreError, match=r"contribution \d of learner 'p\d' \(generation 1\) .* is damaged: its checksum"
    ):
        replay(copy)


def test_a_damaged_seed_is_named(copy: Path) -> None:
    path = segments(copy)[0]
    flip(path, edit_head(path, "state", lambda head: None, number=1) + 100)
    with pytest.raises(StoreError, match=r"theta of fragment 1 at version 0 \(seed\) is damaged"):
        replay(copy)


def test_other_numbers_with_good_checksums_are_a_mismatch(copy: Path) -> None:
    path = segments(copy)[0]
    forged = bytearray()

    def take(head: dict[str, Any]) -> None:
        forged.extend(head["checksum"].to_bytes(8, "little"))

    body = edit_head(path, "payload", take, number=4)
    data = bytearray(path.read_bytes())
    with SegmentReader(segment_files(path.parent)[0]) as reader:
        record = [r for r in reader.records() if r.kind == "payload"][4]
    data[body + record.body_bytes - 1] ^= 1
    path.write_bytes(data)
    value = xxhash.xxh3_64_intdigest(bytes(data[body : body + record.body_bytes]))
    # A checksum with fewer digits fits the head, one with more would not: another bit gives another one.
    bit = 1
    while len(str(value)) > len(str(int.from_bytes(forged, "little"))):
        data[body + record.body_bytes - 2] ^= bit
        bit += 1
        value = xxhash.xxh3_64_intdigest(bytes(data[body : body + record.body_bytes]))
    path.write_bytes(data)
    edit_head(path, "payload", lambda head: head.update(checksum=value), number=4)
    report = replay(copy)
    assert report.mismatch is not None and not report.identical and report.mismatch.what == "the merge"
    assert (report.mismatch.fragment, report.mismatch.version) == (record.head["fragment"], record.head["version"])
    assert report.mismatch.expected != report.mismatch.found
    result = CliRunner().invoke(app, ["replay", str(copy)])
    assert result.exit_code == 1 and f"DIFFERENT: fragment {report.mismatch.fragment}, version" in result.output


# ---------------------------------------------------------------- bad input


def foreign_tape(folder: Path, other: Path) -> None:
    shutil.rmtree(folder / "state" / "tape")
    shutil.copytree(other / "state" / "tape", folder / "state" / "tape")


def foreign_decisions(folder: Path, other: Path) -> None:
    """The tape of another run that has, by hand, this one's name."""
    ours = read_state(folder / "state").rows["run"]["run"]
    theirs = read_state(other / "state").rows["run"]["run"]
    foreign_tape(folder, other)
    from atoll.store.tape_record import frame, read_records

    for path in (folder / "state" / "tape").iterdir():
        records, _ = read_records(path.read_bytes())
        path.write_bytes(b"".join(frame(json.dumps(record).replace(theirs, ours).encode()) for record in records))


def foreign_seed(folder: Path, other: Path) -> None:
    shutil.copy(segments(other)[0], segments(folder)[0])


def other_layout(folder: Path, other: Path) -> None:
    path = segments(folder)[1]
    (_, segment) = segment_files(path.parent)
    with SegmentReader(segment) as reader:
        about = dict(reader.about)
        first = next(reader.records())
    about["layout"] = "0" * 64
    head = json.dumps(about, separators=(",", ":")).encode()
    frame = FRAME.pack(MARKER, len(head), 0, head_checksum(head, 0)) + head
    path.write_bytes(frame + path.read_bytes()[first.offset :])


def other_codec(folder: Path, other: Path) -> None:
    edit_head(segments(folder)[0], "payload", lambda head: head.update(codec="int8"))


def no_payloads(folder: Path, other: Path) -> None:
    shutil.rmtree(folder / "state" / "recording")


def no_state(folder: Path, other: Path) -> None:
    shutil.rmtree(folder / "state")


def no_run(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)


def noise(folder: Path, other: Path) -> None:
    for path in (*segments(folder), *(folder / "state" / "tape").iterdir()):
        path.write_bytes(np.random.default_rng(1).bytes(4000))


def senseless(folder: Path, other: Path) -> None:
    edit_head(segments(folder)[0], "merge", lambda head: head.update(weights=7))


BAD = [
    (foreign_tape, "holds no recording of run"),
    (foreign_decisions, "the tape and the recording do not belong together"),
    (foreign_seed, r"first parameters of fragments \[0, 1, 2\].*belongs to another run"),
    (other_layout, "another layout"),
    (other_codec, "is damaged: int8 payload of"),  # learners may send in codecs of their own: its size tells
    (no_payloads, "start runs that are to be replayed with --record"),
    (no_state, "holds no state of a run"),
    (no_run, "there is no folder"),
    (noise, "says which run this is"),
    (senseless, "the merge record makes no sense"),
]


@pytest.fixture(scope="module")
def other_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / "run"
    RecordedRun(folder, seed=1).live(7)
    return folder


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_bad_input_is_one_clear_message(
    copy: Path, other_run: Path, spoil: Callable[[Path, Path], None], message: str
) -> None:
    spoil(copy, other_run)
    with pytest.raises(StoreError, match=message):
        replay(copy)
    result = CliRunner().invoke(app, ["replay", str(copy)])
    assert isinstance(result.exception, AtollError)  # `atoll` prints it and exits with 2


def test_a_truncated_tape_is_told_and_the_recording_is_enough(copy: Path) -> None:
    tape = max((copy / "state" / "tape").iterdir())
    tape.write_bytes(tape.read_bytes()[:-5])
    report = replay(copy)
    assert report.identical and any("never finished" in problem for problem in report.problems)
    shutil.rmtree(copy / "state" / "tape")
    report = replay(copy)
    assert report.identical and any("the recording's word is taken" in problem for problem in report.problems)


def test_rounds_and_files_that_cannot_be(copy: Path) -> None:
    last = max(record.head["round"] for record in records_of(copy, "merge"))
    with pytest.raises(ConfigError, match=rf"beyond the end: the last round of this run is {last}. Use --until {last}"):
        replay(copy, last + 1)
    with pytest.raises(ConfigError, match="--until must be a round"):
        replay(copy, -1)
    with pytest.raises(LaunchError, match="give another --export"):
        replay(copy, export=copy / "no" / "such" / "folder.safetensors")


def test_recording_needs_a_disk(tmp_path: Path) -> None:
    config, _ = train_config({"record": True})
    assert config.durability.record and config.options()["record"] is True
    assert tomllib.loads(to_toml(config.options(), comment="again"))["record"] is True
    assert not train_config({})[0].durability.record
    with pytest.raises(ConfigError, match=r"record needs the syncer's state on disk.*--no-record"):
        train_config({"record": True, "durability": "none"})
    with pytest.raises(ConfigError, match="setting record must be bool, not 'yes'"):
        train_config({"record": "yes"})
    result = CliRunner().invoke(app, ["syncer", "--record"])
    assert isinstance(result.exception, ConfigError) and "--run-folder" in str(result.exception)


# ---------------------------------------------------------------- diff, and the command


def test_a_run_is_the_same_as_itself_and_parts_from_others(recorded: Path, other_run: Path, tmp_path: Path) -> None:
    same = diff_tapes(recorded, recorded)
    assert same.same and same.decisions == (commits(recorded),) * 2 and same.fragments == {}
    diff = diff_tapes(recorded, other_run)
    assert not diff.same and diff.overall is not None and diff.overall.position == 0
    assert "checksum" in diff.overall.fields and diff.fragments[0].position == 0


def test_a_run_parts_from_its_own_longer_copy_where_it_ends(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "a")
    run.live(6)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    run.live(4)
    diff = diff_tapes(tmp_path / "a", tmp_path / "b")
    assert diff.decisions == (commits(tmp_path / "a"), commits(tmp_path / "b"))
    assert diff.overall is not None and diff.overall.second is None
    assert diff.overall.position == commits(tmp_path / "b") < commits(tmp_path / "a")
    assert all(parting.second is None and parting.first is not None for parting in diff.fragments.values())


def test_runs_without_payloads_can_be_compared(tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        RecordedRun(tmp_path / name, record=False, seed=seed).live(5)
    assert diff_tapes(tmp_path / "a", tmp_path / "a").same
    diff = diff_tapes(tmp_path / "a", tmp_path / "b")
    assert not diff.same and diff.decisions == (commits(tmp_path / "a"), commits(tmp_path / "b"))


def test_the_command_says_what_it_found(
    recorded: Path, other_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CliRunner()
    result = run.invoke(app, ["replay", str(recorded)])
    assert result.exit_code == 0 and f": {commits(recorded)} merges of " in result.output
    assert result.output.rstrip().endswith(": identical")
    result = run.invoke(app, ["replay", str(recorded), "--until", "4", "--json"])
    answer = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 0 and answer["merges"] == 4 and answer["identical"]
    assert (tmp_path / answer["exported"]).name == "run-round-4.safetensors"
    assert (tmp_path / "run-round-4.safetensors").exists()
    assert run.invoke(app, ["replay", str(recorded), "--diff", str(recorded)]).exit_code == 0
    result = run.invoke(app, ["replay", str(recorded), "--diff", str(other_run), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout.splitlines()[-1])["same"] is False
    result = run.invoke(app, ["replay", str(recorded), "--diff", str(other_run)])
    assert (
        "round 1, fragment" in result.output
        and "p0.1#0 x " in result.output
        and "fragment by fragment" in result.output
    )
    result = run.invoke(app, ["replay", str(recorded), "--diff", str(other_run), "--until", "3"])
    assert isinstance(result.exception, ConfigError)
