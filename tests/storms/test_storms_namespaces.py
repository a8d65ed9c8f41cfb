"""Storms across network namespaces: what they refuse, who carries out which fault, and one small real storm (root)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_fakes import command, folder_in, supervisor

from atoll.errors import ConfigError, LaunchError
from atoll.instruments.chaos import Fault, Way, Weather, dump_plan, namespaces_available
from atoll.instruments.chaos.namespaces import ADDRESSES
from atoll.instruments.storms.injection import ChaosOptions, PlannedFaults, StormFaults
from atoll.instruments.storms.namespace_links import NamespaceLinks
from atoll.instruments.storms.storm import StormConfig, run_storm
from atoll.launch.config import train_config
from atoll.launch.plan import LaunchPlan
from atoll.observe import events as ev
from atoll.observe import read_events
from atoll.wire import ClientOptions
from atoll.wire.address import TEST_NETWORK

ROOT = sys.platform.startswith("linux") and os.geteuid() == 0
USABLE, WHY_NOT = namespaces_available() if ROOT else (False, "needs root on Linux")
needs_namespaces = pytest.mark.skipif(not USABLE, reason=f"no network namespaces here: {WHY_NOT}")


def leftovers(pid: int) -> list[str]:
    """Namespaces and links that this process has made and not removed."""
    text = ""
    for what in (["ip", "netns", "list"], ["ip", "-o", "link", "show"]):
        text += subprocess.run(what, capture_output=True, text=True, check=True).stdout
    return sorted(set(re.findall(rf"\b(?:atoll-|ah){pid}-[0-9]+", text)))


# ---------------------------------------------------------------- what is refused


def test_the_token_goes_in_clear_only_where_the_launcher_says_so() -> None:
    assert ADDRESSES == TEST_NETWORK
    with pytest.raises(ConfigError, match="would be sent in clear"):
        ClientOptions("198.18.0.1:7077", token="secret")
    with pytest.raises(ConfigError, match="would be sent in clear"):
        ClientOptions("198.18.0.5:7077", token="secret", clear_host="198.18.0.1")
    ClientOptions("198.18.0.1:7077", token="secret", clear_host="198.18.0.1")
    for elsewhere in ("192.0.2.1", "10.0.0.1", "example.org", "0.0.0.0"):
        with pytest.raises(ConfigError, match=r"cannot get the run token in clear.*unset ATOLL_CLEAR_HOST"):
            ClientOptions(f"{elsewhere}:7077", token="secret", clear_host=elsewhere)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"chaos": "none", "namespaces": True}, "not for chaos none; use storm or calm"),
        ({"chaos": "calm", "rate_mbit": 10.0}, "give --namespaces as well"),
        ({"chaos": "calm", "namespaces": True, "rate_mbit": -1.0}, "rate_mbit must be 0"),
        ({"chaos": "calm", "namespaces": True, "rate_mbit": float("nan")}, "rate_mbit must be 0"),
    ],
)
def test_links_that_a_run_does_not_have_are_refused(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StormFaults().check(train_config(values)[0])


def test_without_root_a_storm_ends_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LaunchError, match=r"--namespaces cannot be used here .*(root|Linux)"):
        run_storm(StormConfig(minutes=1.0, namespaces=True, out=str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()


def test_without_the_tools_the_command_line_says_why(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "atoll", "chaos", "storm", "--namespaces", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=120, env={**os.environ, "PATH": "", "COLUMNS": "300"}
    )
    assert done.returncode == 2 and "--namespaces cannot be used here" in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "out").exists()


# ---------------------------------------------------------------- who carries out what


@needs_namespaces
def test_the_kernel_takes_partitions_and_limits_and_the_proxy_the_rest() -> None:
    links = NamespaceLinks(7, bits_per_s=8e6)
    try:
        links.start(lambda: "127.0.0.1:1")
        address = links.address("learner-0")
        assert links.address("learner-0") == address != links.address("learner-1")
        net = links._net
        assert net.weather("learner-0") == Weather(up=Way(bits_per_s=8e6), down=Way(bits_per_s=8e6))
        faults = [
            Fault("limit", "learner-0", at_s=0.0, lasts_s=1.0, amount=2000.0, direction="up"),
            Fault("limit", "learner-0", at_s=0.0, lasts_s=1.0, amount=90_000.0, direction="down"),
            Fault("partition", "learner-0", at_s=0.0, lasts_s=1.0, direction="down"),
            Fault("delay", "learner-0", at_s=0.0, lasts_s=1.0, amount=100.0),
            Fault("corrupt", "learner-0", at_s=0.0, lasts_s=1.0, amount=1.0),
            Fault("stall", "learner-0", at_s=0.0, lasts_s=1.0),
        ]
        links.hold("learner-0", faults)
        assert net.weather("learner-0") == Weather(up=Way(bits_per_s=2e6), down=Way(bits_per_s=8e6, blocked=True))
        proxied = links._proxy._port("learner-0").link.way("up")
        assert proxied == Way(delay_s=0.1, stalled=True, flips_per_mb=1.0)
        links.hold("learner-0", [])
        assert net.weather("learner-0") == net.weather("learner-1")
        assert len(leftovers(os.getpid())) == 4
    finally:
        links.close()
        links.close()
    assert leftovers(os.getpid()) == []


@needs_namespaces
def test_a_learner_inside_is_the_same_process_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    folder = folder_in(tmp_path)
    told = "keys = ('ATOLL_SYNCER', 'ATOLL_CLEAR_HOST')\n"
    told += "seen = [os.getpid(), os.getsid(0), os.readlink('/proc/self/ns/net'), *(os.environ[key] for key in keys)]\n"
    told += "leaves_politely(); joined(); (run / f'{me}.partial').write_text(json.dumps(seen))\n"
    told += "(run / f'{me}.partial').replace(run / f'{me}.json')\ntime.sleep(600)"
    learners = [command(folder, f"learner-{number}", told) for number in range(2)]
    faults = PlannedFaults((), folder, ChaosOptions(proxied=True, namespaces=True))
    supervised = supervisor(folder, LaunchPlan(learners, syncer=command(folder, "syncer", "serve()"), faults=faults))
    ready = [folder.path / f"learner-{number}.json" for number in range(2)]
    with InterruptedWhen(lambda: all(path.exists() for path in ready)):
        assert supervised.run().reason == "SIGINT"
    supervised._writer.close()
    started = {e.id: e.pid for _, _, e in read_events(folder.path) if isinstance(e, ev.ProcessStarted)}
    exited = {e.id: e.code for _, _, e in read_events(folder.path) if isinstance(e, ev.ProcessExited)}
    seen = [json.loads(path.read_text()) for path in ready]
    for number, (pid, session, network, address, clear_host) in enumerate(seen):
        assert pid == session == started[f"learner-{number}"]
        assert network != str(Path("/proc/self/ns/net").readlink())
        assert address.rpartition(":")[0] == clear_host != "127.0.0.1"
    assert seen[0][2] != seen[1][2] and seen[0][3] != seen[1][3]
    assert exited == {"learner-0": 0, "learner-1": 0, "syncer": 0}, "SIGTERM reached the learners themselves"
    assert leftovers(os.getpid()) == []


class InterruptedWhen:
    """Sends this process a Ctrl-C once something is so."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        self._condition = condition
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            if self._condition():
                os.kill(os.getpid(), signal.SIGINT)
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()


# ---------------------------------------------------------------- for real


@needs_namespaces
def test_a_small_storm_across_namespaces(tmp_path: Path) -> None:
    plan = tmp_path / "storm.toml"
    faults = [
        Fault("limit", "learner-1", at_s=0.5, lasts_s=3.0, amount=4000.0),
        Fault("partition", "learner-0", at_s=1.0, lasts_s=1.5),
    ]
    plan.write_text(dump_plan(faults))
    argv = [sys.executable, "-m", "atoll", "chaos", "storm", "--minutes", "0.1", "--learners", "2", "--model", "nano"]
    argv += ["--step-ms", "60", "--plan", str(plan), "--out", str(tmp_path / "out"), "--json"]
    argv += ["--namespaces", "--rate-mbit", "50"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            printed, said = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    assert process.returncode == 0, said
    card = json.loads(printed.splitlines()[-1])
    assert card["fault_kinds"] == {"limit": 1, "partition": 1}
    assert (card["violations"], card["ledger_exact"], card["namespaces"], card["rate_mbit"]) == ([], True, True, 50.0)
    for name in ("run", "twin"):
        config = json.loads((Path(card[name]) / "config.json").read_text())
        assert config["namespaces"] is True and config["rate_mbit"] == 50.0
        finished = [e for _, _, e in read_events(Path(card[name])) if isinstance(e, ev.LearnerFinished)]
        assert {event.learner for event in finished} == {"learner-0", "learner-1"}
    assert leftovers(process.pid) == []
    with pytest.raises(LaunchError, match=r"rate_mbit 50\.0 instead of 20\.0"):
        run_storm(
            StormConfig(
                minutes=0.1,
                learners=2,
                model="nano",
                step_ms=60.0,
                plan=str(plan),
                twin=card["twin"],
                namespaces=True,
                rate_mbit=20.0,
            )
        )
