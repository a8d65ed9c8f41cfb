"""A second syncer that stands by, and relays before the learners, as the launcher keeps them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from launch_fakes import HELPERS, command, folder_in, supervisor

from atoll.errors import ConfigError, LaunchError
from atoll.launch.commands import site_of
from atoll.launch.config import run_config, train_config
from atoll.launch.folder import RunFolder
from atoll.launch.pair import PORTS, quiet_port, standby_beside, waiting
from atoll.launch.plan import LaunchPlan, SyncerPolicy
from atoll.launch.process import Command
from atoll.observe import read_events
from atoll.observe.events import ProcessExited, ProcessStarted

QUICK = SyncerPolicy(delay_s=0.05, delay_s_max=0.1, early_deaths_max=3)

SYNCER = """
def dead(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "TZ"
    except OSError:
        return True

if "--standby" in sys.argv:
    until(lambda: exists("syncer.json") and dead(syncer_pid()))
    with open(run / "took-over", "a") as file:
        file.write(f"{os.getpid()} {sys.argv[sys.argv.index('--listen') + 1]}\\n")
serve()
"""


def pair(folder: RunFolder, program: str = SYNCER) -> dict[str, Command]:
    syncer = command(folder, "syncer", program, "--listen", "127.0.0.1:0", "--first-start")
    return {"syncer": syncer, "standby": standby_beside(syncer)}


def test_who_stood_by_serves_and_who_was_gone_stands_by(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    kills = "joined(); stepped(10)\nfor _ in range(2): kill_syncer(); time.sleep(0.5)\nstepped(10)\n"
    plan = LaunchPlan([command(folder, "learner-0", kills)], **pair(folder), syncer_restarts=QUICK)  # type: ignore[arg-type]
    supervised = supervisor(folder, plan, said)
    outcome = supervised.run()
    supervised._writer.close()
    assert (outcome.reason, outcome.syncer_restarts, outcome.syncer_code) == ("finished", 2, 0)
    took = [line.split() for line in (folder.path / "took-over").read_text().splitlines()]
    assert len(took) == 2 and took[0][0] != took[1][0]
    assert "standby has taken over" in said and "syncer has taken over" in said
    exits = [e.code for _, _, e in read_events(folder.path) if isinstance(e, ProcessExited) and e.role == "syncer"]
    assert sorted(exits) == [-15, -9, -9, 0]  # a fake that waits does not catch SIGTERM
    assert folder.model_file.exists()


def test_one_that_finds_itself_overtaken_stands_by(tmp_path: Path) -> None:
    """Frozen, overtaken, awake again, it ends with status 3. The launcher must not take that for a fight."""
    folder, said = folder_in(tmp_path), list[str]()
    program = SYNCER.replace("serve()", "signal.signal(signal.SIGCONT, lambda *_: os._exit(3))\nserve()")
    freezes = (
        "joined(); stepped(10); old = syncer_pid(); os.kill(old, signal.SIGSTOP)\n"
        "until(lambda: syncer_pid() != old); os.kill(old, signal.SIGCONT)\n"
        "told = lambda: json.loads((run / 'processes.json').read_text())\n"
        "listed = lambda: [e['pid'] for e in told() if e['role'] == 'syncer']\n"
        "until(lambda: old not in listed() and len(listed()) == 2); stepped(10)\n"
    )
    plan = LaunchPlan([command(folder, "learner-0", freezes)], **pair(folder, program), syncer_restarts=QUICK)  # type: ignore[arg-type]
    outcome = supervisor(folder, plan, said).run()
    assert (outcome.reason, outcome.syncer_restarts) == ("finished", 1)
    assert any("the other one has taken over" in line for line in said)


def test_a_standby_that_never_stays_up_ends_the_run(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    broken = "if '--standby' in sys.argv: sys.exit(7)\nserve()"
    policy = SyncerPolicy(delay_s=0.01, delay_s_max=0.02, restarts_max=3)
    plan = LaunchPlan(
        [command(folder, "learner-0", "joined(); time.sleep(60)")], **pair(folder, broken), syncer_restarts=policy
    )  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"died 4 times .* and is given up"):
        supervisor(folder, plan).run()


RELAY = """
place = pathlib.Path(sys.argv[sys.argv.index("--run-folder") + 1])
place.mkdir(parents=True, exist_ok=True)
(place / "upstream").write_text(sys.argv[sys.argv.index("--upstream") + 1])
told = {"address": f"127.0.0.1:{9 + int(place.name)}", "pid": os.getpid()}
(place / "partial").write_text(json.dumps(told))
(place / "partial").replace(place / "relay.json")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
time.sleep(600)
"""


def test_learners_get_the_relay_of_their_site_first_and_then_the_syncer(tmp_path: Path) -> None:
    folder, said = folder_in(tmp_path), list[str]()
    told = (
        "joined(); (run / f'told-{me}').write_text(os.environ['ATOLL_SYNCER'])\n"
        "if me == 'learner-0':\n"
        "    pid = json.loads((run / 'relays/1/relay.json').read_text())['pid']; os.kill(pid, 9)\n"
        "    until(lambda: json.loads((run / 'relays/1/relay.json').read_text())['pid'] != pid); time.sleep(0.5)\n"
        "stepped(10)"
    )
    learners = []
    for number in range(4):
        one = command(folder, f"learner-{number}", told)
        learners.append(Command(one.role, one.id, one.argv, {**one.environment, "ATOLL_RANK": str(number)}))
    argv = (sys.executable, "-c", HELPERS + RELAY)
    environment = {"ATOLL_RUN_FOLDER": str(folder.path)}
    relays = [
        Command("relay", f"relay-{n}", (*argv, "--run-folder", str(folder.relay_folder(n))), environment)
        for n in (0, 1)
    ]
    plan = LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), relays=relays, syncer_restarts=QUICK)
    supervised = supervisor(folder, plan, said)
    assert supervised.run().reason == "finished"
    supervised._writer.close()
    assert [(folder.path / f"told-learner-{n}").read_text() for n in range(4)] == [
        f"127.0.0.1:{port},127.0.0.1:1" for port in (9, 9, 10, 10)
    ]
    assert (folder.relay_folder(0) / "upstream").read_text() == "127.0.0.1:1"
    assert "relay-1 is back (restart 1)" in said
    started = [e.id for _, _, e in read_events(folder.path) if isinstance(e, ProcessStarted) and e.role == "relay"]
    assert sorted(started) == ["relay-0", "relay-1", "relay-1"]
    ends = [
        (e.id, e.code) for _, _, e in read_events(folder.path) if isinstance(e, ProcessExited) and e.role == "relay"
    ]
    assert sorted(ends) == [("relay-0", 0), ("relay-1", -9), ("relay-1", 0)]
    assert [e["id"] for e in json.loads(folder.processes_file.read_text()) if e["role"] == "relay"] == [
        "relay-0",
        "relay-1",
    ]


def test_neighbours_are_in_one_site_and_guests_are_shared_out() -> None:
    assert [site_of(n, learners=6, sites=2) for n in range(9)] == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert [site_of(n, learners=5, sites=2) for n in range(5)] == [0, 0, 0, 1, 1]


def test_the_standby_has_a_port_that_is_known_before_it_serves() -> None:
    syncer = Command("syncer", "syncer", ["atoll", "--listen", "127.0.0.1:0", "--first-start"], {})
    standby = standby_beside(syncer)
    assert waiting(standby) and not waiting(syncer) and "--first-start" not in standby.argv
    assert int(standby.argv[standby.argv.index("--listen") + 1].rpartition(":")[2]) in PORTS
    assert quiet_port() in PORTS


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"relays": 3}, "relays must be a whole number from 0 to 2"),
        ({"relays": -1}, "relays must be a whole number"),
        ({"standby": True, "shards": "learners"}, "know one syncer alone"),
        ({"standby": True, "durability": "none"}, "nothing to go on from"),
        ({"shards": "learners", "chaos": "storm"}, "cannot reach shards beside learners"),
    ],
)
def test_what_a_fabric_cannot_be_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_config({"learners": 2, **more})
    with pytest.raises(ConfigError, match=said):
        train_config({"learners": 2, **more})
