"""docs/HOSTS.md as it stands: its shell blocks, in order, on hosts that are network namespaces (root on Linux).

A block begins with `# on HOST` or `# on HOST, keeps running`. Comments `<!-- test: ... -->` in the page say what
happens in between. The page's own commands are run; only the pause between two snapshots is shorter.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer
from cluster import WAIT_S as PROCESS_WAIT_S
from cluster import small_model

import atoll
from atoll.app import app
from atoll.instruments.chaos import HostNet, namespaces_available
from atoll.observe import events as ev
from atoll.observe import read_events

ROOT = sys.platform.startswith("linux") and os.geteuid() == 0
USABLE, WHY_NOT = namespaces_available() if ROOT else (False, "needs root on Linux")
PAGE = (Path(__file__).parents[2] / "docs" / "HOSTS.md").read_text()
PARTS = re.compile(r"```(?P<language>sh|python)\n(?P<block>.*?)```|<!-- test: (?P<word>.*?) -->", re.DOTALL)
KEYS = ("init", "issue", "list", "renew", "revoke")
WAIT_S = 3 * PROCESS_WAIT_S
"""Every step starts processes on several hosts, beside whatever else the machine does."""
SHORTER = {"--snapshot-every 5m": "--snapshot-every 2s"}

TRAIN = f"""
import sys, time, torch
sys.path.append({str(Path(__file__).parents[1])!r})
import atoll
from cluster import small_model
model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        x = torch.randn(8, 32)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.02)
        learner.step(tokens=8)
"""
COMMANDS = {
    "python": f'exec {sys.executable} "$@"',
    "atoll": f'exec {sys.executable} -m atoll "$@"',
    # The last word is the target, "host:"; every host's disk is a folder beside the others.
    "scp": 'while [ $# -gt 1 ]; do files="$files $1"; shift; done; cp $files "$DISKS/${1%:}"',
}


class Hosts:
    """The page's hosts. Each has a folder for its disk, in which its commands run."""

    def __init__(self, net: HostNet, folder: Path) -> None:
        self.net, self.disks = net, folder / "disks"
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        commands = folder / "bin"
        commands.mkdir()
        for name, text in COMMANDS.items():
            (commands / name).write_text(f"#!/bin/sh\n{text}\n")
            (commands / name).chmod(0o755)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("ATOLL_", "AWS_"))},
            "PATH": f"{commands}:{os.environ['PATH']}",
            "DISKS": str(self.disks),
            "OMP_NUM_THREADS": "1",
        }
        for host in dict.fromkeys(re.findall(r"# on ([a-z.-]+)", PAGE)):
            self.disk(host)
            net.add(host)

    def disk(self, host: str) -> Path:
        path = self.disks / host
        path.mkdir(parents=True, exist_ok=True)
        return path

    def run(self, host: str, script: str) -> str:
        command = self.net.wrap(host, ["sh", "-ec", script])
        done = subprocess.run(
            command,
            cwd=self.disk(host),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, f"on {host}:\n{script}\n{done.stdout}\n{self.logs()}"
        return done.stdout

    def start(self, host: str, script: str) -> None:
        """In a group of its own, so that all of it can be killed at once."""
        with (self.disk(host) / "log").open("ab") as log:
            self.running[host] = subprocess.Popen(
                self.net.wrap(host, ["sh", "-ec", script]),
                cwd=self.disk(host),
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, host: str) -> None:
        process = self.running.pop(host)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def lose(self, host: str) -> None:
        """The process is gone, and so is the disk. The host itself answers still, which saves the test the 15 s after
        which silence is noticed: benchmarks/hosts.py has that."""
        self.kill(host)
        shutil.rmtree(self.disk(host))
        self.disk(host)  # a new one

    def ended(self, host: str) -> bool:
        status = self.running[host].poll()
        assert status in (None, 0), f"{host} ended with {status}:\n{self.logs()}"
        if status == 0:
            del self.running[host]
        return status == 0

    def said(self, kind: type[ev.Event]) -> list[ev.Event]:
        """What the syncers' disks hold of this kind, in order. A folder that was copied has everything again."""
        folders = [folder for folder in self.disks.glob("syncer-*/runs/big") if any(folder.glob("events/*.jsonl"))]
        found = {(t_ns, repr(event)): event for folder in folders for t_ns, _, event in read_events(folder)}
        return [event for _, event in sorted(found.items(), key=lambda one: one[0]) if isinstance(event, kind)]

    def contributors(self, after: int) -> set[str]:
        """Who is in the commits that followed the first so many."""
        return {learner for event in self.said(ev.Committed)[after:] for learner in event.contributors}

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"never happened: {what}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        files = [file for file in self.disks.glob("*/log") if file.parent.name != "s3.example"]
        return "\n".join(f"== {file.parent.name}\n{file.read_text()[-1500:]}" for file in files)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with HostNet() as net:
        hosts = Hosts(net, tmp_path)
        try:
            yield hosts
        finally:
            for host in list(hosts.running):
                hosts.kill(host)


def start_s3(hosts: Hosts) -> None:
    address = hosts.net.add("s3.example")
    url = f"http://{address}:5000"
    hosts.environment |= {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    hosts.environment |= {"AWS_ACCESS_KEY_ID": "someone", "AWS_SECRET_ACCESS_KEY": "something"}
    hosts.start("s3.example", "python -m moto.server -H 0.0.0.0 -p 5000")
    ask = f"import urllib.request as u; u.urlopen(u.Request('{url}/atoll', method='PUT'), timeout=5)"
    hosts.run("s3.example", f'for i in $(seq 100); do python -c "{ask}" 2>/dev/null && exit 0; sleep 0.2; done; exit 1')


def happen(hosts: Hosts, word: str) -> None:
    """What the page's comments say."""
    if match := re.fullmatch(r"wait until (.*) and (.*) contribute", word):
        seen = len(hosts.said(ev.Committed))
        hosts.wait(lambda: set(match.groups()) <= hosts.contributors(seen), word)
    elif word == "wait for a snapshot":
        hosts.wait(lambda: bool(hosts.said(ev.SnapshotWritten)), word)
    elif match := re.fullmatch(r"kill the syncer on (.*)", word):
        hosts.kill(match[1])
    elif match := re.fullmatch(r"lose (.*)", word):
        hosts.lose(match[1])
    elif match := re.fullmatch(r"wait until (.*) has ended", word):
        hosts.wait(lambda: hosts.ended(match[1]), word)
    else:
        raise AssertionError(f"the page says {word!r}, which this test does not know")


def test_every_option_that_the_page_names_exists() -> None:
    """Also where the page cannot be run; and with it the options that it names in passing."""
    commands = typer.main.get_command(app).commands
    text = re.sub(r"\\\n\s*", "", PAGE)
    commands |= {f"keys {name}": command for name, command in commands["keys"].commands.items()}
    asked = re.findall(r"atoll (syncer|status|leave|export|plan|keys [a-z]+)\b([^`\n]*)", text)
    named = {"syncer", "status", "leave", "export", "plan"} | {f"keys {name}" for name in KEYS}
    assert {name for name, _ in asked} == named
    known = {name: {option for one in commands[name].params for option in one.opts} for name, _ in asked}
    for name, rest in asked:
        assert set(re.findall(r"--[a-z-]+", rest)) <= known[name], f"atoll {name} {rest}"
    in_passing = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--watch", "--tokens-per-step"}
    assert in_passing <= known["syncer"] and "--watch" in known["status"]
    assert "--tokens-per-step" in known["keys issue"]


@pytest.mark.skipif(not USABLE, reason=f"no network namespaces here: {WHY_NOT}")
def test_every_command_of_the_page_works_in_its_order(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography", reason="pip install 'atoll[keys]'")
    pytest.importorskip("s3fs", reason="pip install 'atoll[s3]'")
    pytest.importorskip("moto.server", reason="pip install 'atoll[dev]'")
    start_s3(hosts)
    for host in ("paris.example", "tokyo.example"):
        (hosts.disk(host) / "train.py").write_text(TRAIN)
    said = []
    for part in PARTS.finditer(PAGE):
        if part["word"]:
            happen(hosts, part["word"])
        elif part["language"] == "sh":
            first, _, script = part["block"].partition("\n")
            for there, here in SHORTER.items():
                script = script.replace(there, here)
            host, keeps_running = re.fullmatch(r"# on ([a-z.-]+)(, keeps running)?", first).groups()
            if keeps_running:
                hosts.start(host, script)
            else:
                said.append(hosts.run(host, script))
        else:
            monkeypatch.chdir(hosts.disk("syncer-a.example"))
            model = small_model()
            exec(part["block"], {"atoll": atoll, "model": model})

    hosts.wait(
        lambda: hosts.ended("paris.example") and hosts.ended("tokyo.example"), "both learners have left in order"
    )
    assert any("paris" in text and "tokyo" in text for text in said), "the status names the learners"
    assert all(not text.startswith("Traceback") for text in said)
    assert hosts.contributors(0) == {"paris", "tokyo"}, "both were found again by the syncer on the other host"
    lost, moved, upgraded = hosts.said(ev.SyncerRecovered)
    assert lost.source.startswith("snapshot-") and moved.source == upgraded.source == "slots"
    assert max(lost.versions) < max(moved.versions) < max(upgraded.versions)
    assert [event.learner for event in hosts.said(ev.FragmentHealed)] or min(lost.versions) > 0
    disk = hosts.disk("syncer-a.example")
    published = atoll_tensors(disk / "runs/big/model.safetensors")
    assert all(torch.equal(published[name], value) for name, value in model.state_dict().items())
    assert atoll_tensors(disk / "from-s3.safetensors").keys() == published.keys()


def atoll_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)
