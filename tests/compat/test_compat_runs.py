"""Real processes of older protocols and the current code in one run, both ways round, and upgrades while it goes on."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import WAIT_S, SyncerThread, TrainingThread, last_json, small_model
from compat_old import OldCode

from atoll.core.config import SyncConfig
from atoll.core.membership import MemberState
from atoll.core.messages import PROTOCOL_VERSION
from atoll.observe import events, read_events
from atoll.wire import ClientOptions, fetch_status

SETTINGS: dict[str, Any] = {"sync_every": 4, "fragments": 4, "overlap": 2, "quorum": "50%", "learners_expected": 2}
TOKENS = 32
"""Per step, here and in cluster.TrainingThread."""

OLD_LEARNER = """
import json, pathlib, sys, time, torch, xxhash, atoll
address, name, width, stop = sys.argv[1], sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4])
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(32, width), torch.nn.Tanh(), torch.nn.Linear(width, 32))
taken = 0
with atoll.Learner(model, address=address, learner_id=name) as learner:
    while not stop.exists():
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.01 * gradient  # torch.optim would take seconds to import
        learner.step(tokens=32, loss=float(loss))
        taken += 1
        time.sleep(0.02)
held = [xxhash.xxh3_64_intdigest(published.theta.data) for published in learner._engine.vault.current]
print(json.dumps({"taken": taken, "versions": learner.versions(), "checksums": held}))
"""

OLD_SYNCER = """
import json, pathlib, sys
from atoll.core.config import SyncConfig
from atoll.syncer import SyncerOptions, run_syncer
listen, settings, folder = sys.argv[1:]
config = SyncConfig.from_dict(json.loads(settings))
sys.exit(run_syncer(SyncerOptions(listen=listen, config=config, run_folder=pathlib.Path(folder))))
"""


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    """Things to stop at the end of a test, last first."""
    started: list[Any] = []
    yield started
    for part in reversed(started):
        part.stop()


@contextmanager
def running(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that does not outlive its test."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(condition: Callable[[], bool], what: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: the process ended first: {process.stdout and process.stdout.read()}")
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def reaches(minimum: int) -> Callable[[Any], bool]:
    return lambda shell: all(track.version >= minimum for track in shell.machine.book.tracks)


def state_of(name: str, state: MemberState, generation: int = 1) -> Callable[[Any], bool]:
    def check(shell: Any) -> bool:
        member = shell.machine.membership.members.get(name)
        return member is not None and member.state is state and member.generation == generation

    return check


def protocols(syncer: SyncerThread) -> dict[str, int]:
    return syncer.ask(lambda shell: {n: m.protocol for n, m in shell.machine.membership.members.items()})  # type: ignore[no-any-return]


class OldSyncer:
    """A syncer of an older protocol as a process. What is known of it is what its status says."""

    def __init__(self, old_code: OldCode, folder: Path, listen: str = "127.0.0.1:0") -> None:
        folder.mkdir()
        self.process = old_code.start(OLD_SYNCER, listen, json.dumps(SETTINGS), str(folder))
        told = folder / "syncer.json"
        wait_until(told.exists, "the old syncer to listen", self.process)
        self.address: str = json.loads(told.read_text())["address"]

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(self.address)))

    def wait_for(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        statuses: list[dict[str, Any]] = []

        def holds() -> bool:
            statuses[:] = [self.status()]
            return condition(statuses[0])

        wait_until(holds, what, self.process)
        return statuses[0]

    def finish(self) -> None:
        """As an operator would: SIGTERM, upon which it saves the model and ends."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=WAIT_S)
        assert self.process.returncode == 0, out

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=WAIT_S)


# ---------------------------------------------------------------- an old learner under the current syncer


@pytest.mark.parametrize(
    "first, codec, width",
    [
        pytest.param("older", "int4", 32, id="the old one seeds, small payloads on control"),
        pytest.param("current", "fp32", 4000, id="the current one seeds, payloads over bulk"),
    ],
)
def test_an_old_learner_trains_with_a_current_one(
    first: str, codec: str, width: int, old_code: OldCode, parts: list[Any], tmp_path: Path
) -> None:
    config = SyncConfig.from_dict({**SETTINGS, "codec_up": codec, "codec_down": codec})
    syncer = SyncerThread(config, folder=tmp_path)
    parts.append(syncer)

    def start_current() -> TrainingThread:
        learner = TrainingThread(syncer.address, "current", model=small_model(width), step_s=0.02)
        parts.append(learner)
        return learner

    def merged(name: str) -> Callable[[Any], bool]:
        return lambda shell: min(map(len, shell.machine.membership.members[name].merged)) >= 2

    stop = tmp_path / "stop"
    current = start_current() if first == "current" else None
    if current is not None:
        syncer.wait_for(reaches(0), "the seed")
    with running(old_code.start(OLD_LEARNER, syncer.address, "older", str(width), str(stop))) as older:
        wait_until(lambda: syncer.ask(state_of("older", MemberState.ACTIVE)), "the old learner to join", older)
        current = current or start_current()
        syncer.wait_for(state_of("current", MemberState.ACTIVE), "the current learner to join")
        assert protocols(syncer) == {"older": old_code.protocol, "current": PROTOCOL_VERSION}
        for name in ("older", "current"):
            syncer.wait_for(merged(name), f"several contributions of {name} to every fragment")
        stop.touch()
        result = last_json(older)
    syncer.wait_for(state_of("older", MemberState.LEFT), "a clean leave of the old learner")
    current.wait_steps(10)
    current.stop()
    assert current.error is None
    syncer.wait_for(lambda shell: not shell.machine.book.in_flight, "rest")
    stats = syncer.check_ledger()
    assert stats["tokens_merged"] == stats["tokens_processed"] == (result["taken"] + current.taken) * TOKENS
    syncer.stop()
    commits = [e for _, _, e in read_events(tmp_path) if isinstance(e, events.Committed)]
    counts = Counter(name for commit in commits for name in commit.contributors)
    assert counts["older"] >= 8 and counts["current"] >= 8
    assert any(len(commit.contributors) == 2 for commit in commits)
    published = {(commit.fragment, commit.version): commit.checksum for commit in commits}
    # What the old learner held when it left is what the syncer published, to the bit.
    assert all(published[p, v] == result["checksums"][p] for p, v in enumerate(result["versions"]))


@pytest.mark.parametrize("old_code", [1], indirect=True)
@pytest.mark.parametrize(
    "changes, named",
    [({"codec_up": "int2"}, "codec_up int2"), ({"feedback_up": False}, "feedback_up off")],
    ids=["a codec", "a switch"],
)
def test_an_old_learner_is_refused_where_it_would_have_to_follow_what_it_does_not_know(
    changes: dict[str, Any], named: str, old_code: OldCode, parts: list[Any], tmp_path: Path
) -> None:
    syncer = SyncerThread(SyncConfig.from_dict({**SETTINGS, **changes}))
    parts.append(syncer)
    with running(old_code.start(OLD_LEARNER, syncer.address, "older", "32", str(tmp_path / "stop"))) as older:
        out, _ = older.communicate(timeout=WAIT_S)
        assert older.returncode != 0 and f"this run uses {named}, which learner 'older' does not know" in out, out
    current = TrainingThread(syncer.address, "current", step_s=0.01)
    parts.append(current)
    syncer.wait_for(state_of("current", MemberState.ACTIVE), "the current learner to seed and join")
    assert protocols(syncer) == {"current": PROTOCOL_VERSION}  # the old one left no trace


def test_a_newer_build_takes_over_from_an_old_learner_while_the_run_goes_on(
    old_code: OldCode, parts: list[Any], tmp_path: Path
) -> None:
    syncer = SyncerThread(SyncConfig.from_dict(SETTINGS))
    parts.append(syncer)
    steady = TrainingThread(syncer.address, "steady")
    parts.append(steady)
    with running(old_code.start(OLD_LEARNER, syncer.address, "island", "32", str(tmp_path / "never"))) as older:

        def merged(shell: Any) -> bool:
            member = shell.machine.membership.members.get("island")
            return member is not None and any(member.merged)

        wait_until(lambda: syncer.ask(merged), "a merged contribution of the old learner", older)
        newer = TrainingThread(syncer.address, "island")
        parts.append(newer)
        out, _ = older.communicate(timeout=WAIT_S)
    assert older.returncode != 0 and "[fenced]" in out
    syncer.wait_for(state_of("island", MemberState.ACTIVE, generation=2), "its successor")
    syncer.wait_for(merged, "a merged contribution of its successor")
    assert protocols(syncer) == {"steady": PROTOCOL_VERSION, "island": PROTOCOL_VERSION}
    for learner in (steady, newer):
        learner.stop()
        assert learner.error is None
    syncer.wait_for(lambda shell: not shell.machine.book.in_flight, "rest")
    stats = syncer.check_ledger()
    assert stats["tokens_pending"] == 0
    assert set(stats["tokens_discarded"]) <= {"learner_lost"}  # what the old process had not handed over


# ---------------------------------------------------------------- current learners under an old syncer


def test_current_learners_train_under_an_old_syncer(old_code: OldCode, parts: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "old"
    syncer = OldSyncer(old_code, folder)
    parts.append(syncer)
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i, steps=100) for i in range(2)]
    parts += learners
    for learner in learners:
        learner.thread.join(WAIT_S)
        assert not learner.thread.is_alive() and learner.error is None
    status = syncer.wait_for(lambda s: s["tokens_pending"] == 0, "everything merged")
    assert {m["learner"]: m["state"] for m in status["members"]} == {"l0": "left", "l1": "left"}
    assert status["tokens_merged"] == status["tokens_processed"] == 2 * 100 * TOKENS
    assert min(status["versions"]) >= 5 and not status["tokens_discarded"]
    syncer.finish()
    assert (folder / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("order", ["upgrade", "downgrade"])
def test_the_syncer_is_replaced_by_another_version_and_the_learners_go_on(
    order: str, old_code: OldCode, parts: list[Any], tmp_path: Path
) -> None:
    """Nothing is left on disk: the next one is seeded by a learner (protocol 1), or goes on from what learners hold."""

    def old_commits(status: dict[str, Any]) -> bool:
        return bool(status["versions"]) and min(status["versions"]) >= 3

    def current(listen: str) -> SyncerThread:
        syncer = SyncerThread(SyncConfig.from_dict(SETTINGS), listen=listen, run="current")
        parts.insert(0, syncer)
        return syncer

    def older(listen: str) -> OldSyncer:
        syncer = OldSyncer(old_code, tmp_path / "old", listen)
        parts.insert(0, syncer)
        return syncer

    before = older("127.0.0.1:0") if order == "upgrade" else current("127.0.0.1:0")
    learners = [TrainingThread(before.address, f"l{i}", seed=i) for i in range(2)]
    parts += learners
    if isinstance(before, OldSyncer):
        before.wait_for(old_commits, "commits of the old syncer")
    else:
        before.wait_for(reaches(3), "commits of the current syncer")
    before.stop()
    taken = [learner.taken for learner in learners]
    after = current(before.address) if order == "upgrade" else older(before.address)
    if isinstance(after, OldSyncer):
        after.wait_for(old_commits, "commits of the old syncer")
    else:
        after.wait_for(reaches(3), "commits of the current syncer")
        assert protocols(after) == {"l0": PROTOCOL_VERSION, "l1": PROTOCOL_VERSION}
        after.check_ledger()
    assert all(learner.taken > before_count for learner, before_count in zip(learners, taken, strict=True))
    for learner in learners:
        learner.stop()
        assert learner.error is None
