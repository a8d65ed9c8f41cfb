"""The trial on several machines: a run on hosts with thin links, a link that goes down, and a syncer that moves twice.

    python benchmarks/hosts.py                  # 15 minutes with everything in it, then the same run on fat links
    python benchmarks/hosts.py --minutes 3      # a rehearsal: the same timeline in a fifth of the time
    python benchmarks/hosts.py --adaptive network --together
                                                # thin links get fewer bits; both runs at once (two cores suffice)
    python benchmarks/hosts.py --together --repeat 3
                                                # three pairs, and how far their ratios are apart

Needs root on Linux (network namespaces), openssl, and the extras `s3` and `dev` (moto stands in for S3). Every host is
a network namespace with a link of its own, shaped in both directions; every process is a real one, started with the
commands of docs/HOSTS.md; TLS and a token throughout. At 20% of the time a link goes down for a fifteenth of it; at 40%
the syncer is killed and its run folder is copied to another host, where it goes on; at 67% that host is lost with its
disk, and a third one continues from S3. The run ends by its token budget.

Prints a table, with each learner's longest time without a merged contribution beside the bound of docs/HOSTS.md, and
ends with status 1 if one does not hold. Writes it with the conditions to OUT/hosts.md (a whole trial: to
docs/results/hosts.md as well).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from atoll import kernels
from atoll.instruments.chaos import HostNet, Way, Weather
from atoll.observe import adapted_text, read_events
from atoll.observe import events as ev

ROOT = Path(__file__).resolve().parents[1]
TOKEN = "a-token-for-the-trial"
PORT = 7077
SYNCERS = ("syncer-a", "syncer-b", "syncer-c")
FAT = 100e6
FATS = {f"fat-{number}": FAT for number in range(1, 6)}
LEARNERS = {**FATS, "two-mbit": 2e6, "thin-200k": 200e3, "thin-50k": 50e3}
"""Each learner's host, and what its link carries in each direction (bits/s)."""
DOWN = "two-mbit"
"""Whose link goes down for a while."""
DOWN_SHARE = 1 / 15
"""Of the trial's time."""
SYNC_EVERY = 8
BATCH, SEQ = 16, 64
INT4_BYTES = 0.52
"""Bytes of one parameter as int4, with its block's scale."""
FETCH_BITS, GIVE_BITS = 32, 4
"""Of each parameter: a fragment that is fetched whole (fp32), and a contribution (int4)."""
ASIDE_PERIODS = 3
"""How long rounds wait for a learner before they go on without it (core.policy)."""
WIDTH, LAYERS, HEADS, LR = 64, 2, 2, 3e-3
FULL_MINUTES = 15.0
MODEL, ALONE = "exported.safetensors", "alone.safetensors"
"""The exported model, and what it was when a single learner had not handed over yet."""
READY, GO = "ready", "go"
"""Files on a learner's disk: its process is loaded; it may join. So every run of the trial begins alike."""
START_S_MAX = 600.0
"""Sixteen processes import torch at once; on a busy machine with two cores that takes minutes."""
LONGER_MAX = 2.5
"""How much longer than planned a run may take: with two learners gone, the others have more to do."""
END_S_MAX = 240.0
"""How long leaving may take after the budget is spent; a learner that leaves has 180 s at most."""


# ---------------------------------------------------------------- a learner: a plain script


def model() -> Any:
    import torch

    from atoll.zoo import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(layers=LAYERS, heads=HEADS, width=WIDTH, lr=LR))


def train(steps: int, step_s: float) -> None:
    """What a user's script does; a step takes at least `step_s`, as it would with a larger model."""
    import torch

    import atoll
    from atoll.zoo import Batches, clip_grad_norm, load_corpus, lr_at, make_optimizer, next_byte_loss, set_lr

    torch.set_num_threads(1)
    gpt = model()
    optimizer = make_optimizer(gpt, "adamw", LR)
    shard = load_corpus("stdlib").shard(int(os.environ["ATOLL_RANK"]), len(LEARNERS))
    batches = Batches(shard, batch=BATCH, seq=SEQ, seed=0)
    kernels.warm_up()
    Path(READY).touch()
    while not Path(GO).exists():
        time.sleep(0.05)
    with atoll.Learner(gpt, optimizer) as learner:
        while not learner.done:
            began_s = time.monotonic()
            set_lr(optimizer, lr_at(learner.step_count, steps, peak=LR))
            loss = next_byte_loss(gpt, *next(batches))
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm(gpt.parameters())
            optimizer.step()
            time.sleep(max(0.0, step_s - (time.monotonic() - began_s)))
            learner.step(tokens=BATCH * SEQ, loss=loss)


# ---------------------------------------------------------------- hosts and their processes


@dataclass
class Trial:
    """One run on its hosts. Each host has a folder that stands for its disk."""

    folder: Path
    net: HostNet
    minutes: float
    step_s: float
    faults: bool
    adaptive: str = "off"
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    began_s: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of each learner: starting takes some of the time."""
        return int(0.95 * self.minutes * 60 / self.step_s)

    @property
    def tokens_budget(self) -> int:
        return self.steps * len(LEARNERS) * BATCH * SEQ

    def say(self, text: str) -> None:
        at_s = time.monotonic() - self.began_s
        self.said.append(f"{int(at_s) // 60}:{int(at_s) % 60:02d} {text}")
        print(f"  {self.said[-1]}", flush=True)

    def host(self, name: str) -> Path:
        path = self.folder / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def start(self, host: str, *command: str, **environment: str) -> None:
        log = (self.host(host) / "log").open("ab")
        self.running[host] = subprocess.Popen(
            self.net.wrap(host, command),
            cwd=self.host(host),
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ATOLL_TOKEN": TOKEN, **environment},
        )

    def start_syncer(self, host: str, *more: str) -> None:
        for name in ("cert.pem", "key.pem"):
            shutil.copy(self.host("ca") / name, self.host(host))
        command = [sys.executable, "-m", "atoll", "syncer", "--listen", f"0.0.0.0:{PORT}", "--run-folder", "run"]
        command += ["--tls-certificate", "cert.pem", "--tls-key", "key.pem", "--learners", str(len(LEARNERS))]
        command += ["--sync-every", str(SYNC_EVERY), "--tokens-budget", str(self.tokens_budget), "--end-when-left"]
        command += [] if self.adaptive == "off" else ["--adaptive", self.adaptive]
        every_s = max(10, round(4 * self.minutes))
        command += ["--snapshots", "s3://atoll/run", "--snapshot-every", f"{every_s}s", "--keep", "3", *more]
        self.start(host, *command, **self.s3)

    def start_learner(self, host: str, rank: int) -> None:
        shutil.copy(self.host("ca") / "ca.pem", self.host(host))
        addresses = ",".join(f"{syncer}:{PORT}" for syncer in SYNCERS)
        names = {"ATOLL_SYNCER": addresses, "ATOLL_TLS_CA": "ca.pem", "ATOLL_LEARNER": host, "ATOLL_RANK": str(rank)}
        worker = [sys.executable, str(Path(__file__)), "--worker", "--minutes", str(self.minutes)]
        self.start(host, *worker, "--step-s", str(self.step_s), ATOLL_RUN_FOLDER="run", **names)

    def start_s3(self) -> None:
        address = self.net.add("s3")
        self.s3 = {"AWS_ENDPOINT_URL": f"http://{address}:5000", "AWS_ACCESS_KEY_ID": "someone"}
        self.s3 |= {"AWS_SECRET_ACCESS_KEY": "something", "AWS_DEFAULT_REGION": "us-east-1"}
        self.start("s3", sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5000")
        script = (
            "import time, urllib.request as u\n"
            "for _ in range(200):\n"
            "    try:\n"
            f"        u.urlopen(u.Request('{self.s3['AWS_ENDPOINT_URL']}/atoll', method='PUT'), timeout=5); break\n"
            "    except OSError: time.sleep(0.2)\n"
            "else: raise SystemExit('no S3')\n"
        )
        subprocess.run(self.net.wrap("s3", [sys.executable, "-c", script]), check=True)

    def keep_events(self, host: str) -> None:
        """What this host's processes said is wanted afterwards, also when its disk is lost."""
        for file in (self.host(host) / "run" / "events").glob("*.jsonl"):
            shutil.copy(file, self.host("events") / f"{host}-{file.name}")

    def kill(self, host: str) -> None:
        self.running[host].kill()
        self.running.pop(host).wait()
        self.keep_events(host)

    def stop(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


def certificates(folder: Path, names: tuple[str, ...]) -> None:
    """The commands of docs/HOSTS.md: a CA of one's own, and a certificate with every name that the syncer may have."""
    named = ",".join(f"DNS:{name}" for name in names)
    for command in (
        "openssl ecparam -genkey -name prime256v1 -noout -out ca.key",
        "openssl req -x509 -new -key ca.key -days 3650 -subj '/CN=our CA' -out ca.pem",
        "openssl ecparam -genkey -name prime256v1 -noout -out key.pem",
        "openssl req -new -key key.pem -subj '/CN=atoll syncer' -out cert.csr",
        f"echo 'subjectAltName={named}' > cert.ext",
        "openssl x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 365 -extfile cert.ext "
        "-out cert.pem",
    ):
        subprocess.run(command, shell=True, cwd=folder, check=True, capture_output=True)


# ---------------------------------------------------------------- the timeline


def run(trial: Trial) -> None:
    """The whole run: start, what happens to it, its end by the budget, and the exported model."""
    certificates(trial.host("ca"), SYNCERS)
    trial.host("events")
    for host in (*SYNCERS, *LEARNERS):
        trial.net.add(host)
    trial.start_s3()
    trial.began_s = time.monotonic()
    trial.start_syncer(SYNCERS[0])
    for rank, (host, rate) in enumerate(LEARNERS.items()):
        rate = rate if trial.faults else FAT
        trial.net.set(host, Weather(up=Way(bits_per_s=rate), down=Way(bits_per_s=rate)))
        trial.start_learner(host, rank)
    wait_for(trial, lambda: all((trial.host(host) / READY).exists() for host in LEARNERS), "every learner is loaded")
    wait_for(trial, lambda: (trial.host(SYNCERS[0]) / "run" / "syncer.json").exists(), "the syncer listens")
    trial.began_s = time.monotonic()
    for host in LEARNERS:
        (trial.host(host) / GO).touch()
    trial.say(f"a syncer and {len(LEARNERS)} learners were started")
    if trial.faults:
        happen(trial)
    finish(trial)


def wait_for(trial: Trial, condition: Callable[[], bool], what: str) -> None:
    """The clock of the trial starts with its training, not with Python's, and for all learners at once."""
    deadline_s = time.monotonic() + START_S_MAX
    while not condition():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"not within {START_S_MAX:g} s: {what}; see the logs in {trial.folder}")
        time.sleep(0.2)
        check(trial)


def happen(trial: Trial) -> None:
    """Everything that goes wrong, at its share of the time."""
    down_s = trial.minutes * 60 * DOWN_SHARE
    link = Weather(up=Way(bits_per_s=LEARNERS[DOWN]), down=Way(bits_per_s=LEARNERS[DOWN]))
    wait_until(trial, 0.2)
    trial.net.set(DOWN, Weather(up=Way(blocked=True), down=Way(blocked=True)))
    trial.say(f"the link of {DOWN} is down")
    wait_until(trial, 0.2, down_s)
    trial.net.set(DOWN, link)
    trial.say(f"the link of {DOWN} is up again")
    wait_until(trial, 0.4)
    trial.kill(SYNCERS[0])
    events = shutil.ignore_patterns("events")
    shutil.copytree(trial.host(SYNCERS[0]) / "run", trial.host(SYNCERS[1]) / "run", ignore=events)
    trial.start_syncer(SYNCERS[1], "--take-over")
    trial.say(f"the syncer on {SYNCERS[0]} was killed; its run folder was copied to {SYNCERS[1]} and it goes on there")
    wait_until(trial, 2 / 3)
    trial.kill(SYNCERS[1])
    trial.net.set(SYNCERS[1], Weather(up=Way(blocked=True), down=Way(blocked=True)))
    shutil.rmtree(trial.host(SYNCERS[1]) / "run")
    trial.start_syncer(SYNCERS[2], "--take-over")
    trial.say(f"the host {SYNCERS[1]} is lost with its disk; {SYNCERS[2]} continues from S3")


def wait_until(trial: Trial, share: float, more_s: float = 0.0) -> None:
    at_s = trial.began_s + share * trial.minutes * 60 + more_s
    while time.monotonic() < at_s:
        time.sleep(min(1.0, max(0.0, at_s - time.monotonic())))
        check(trial)


def check(trial: Trial) -> None:
    for host, process in list(trial.running.items()):
        if process.poll() is not None:
            del trial.running[host]
            trial.keep_events(host)
            trial.say(f"the process on {host} ended with status {process.returncode}")


def finish(trial: Trial) -> None:
    """Wait until the budget is spent, everybody has left and the syncer has ended by itself; then export."""
    last = [host for host in trial.running if host in SYNCERS]
    alone = ""
    deadline_s = trial.began_s + trial.minutes * 60 * LONGER_MAX + END_S_MAX
    while set(trial.running) - {"s3"}:
        time.sleep(0.5)
        check(trial)
        learners = [host for host in trial.running if host in LEARNERS]
        if trial.faults and last and len(learners) == 1 and not alone:
            alone = learners[0]  # what its last progress does to the model is worth knowing
            export(trial, last[0], ALONE)
            trial.say(f"only {alone} has not handed over yet")
        if time.monotonic() > deadline_s:
            trial.say(f"too long: {', '.join(sorted(trial.running))} did not end")
            break
    if not last:
        raise SystemExit("the syncer ended before the run did; see its log")
    export(trial, last[0], MODEL)


def export(trial: Trial, syncer: str, name: str) -> None:
    command = [sys.executable, "-m", "atoll", "export", "run", "--to", name]
    subprocess.run(command, cwd=trial.host(syncer), check=True)
    shutil.copy(trial.host(syncer) / name, trial.folder / name)


# ---------------------------------------------------------------- what came of it


@dataclass
class Tally:
    """What the events say of one learner."""

    steps: int = 0
    tokens: int = 0
    merged: int = 0
    steps_merged: float = 0.0
    """Inner steps behind what was merged, over all fragments' shares."""
    longest_gap_s: float = 0.0
    join_s: float = 0.0
    reason: str = "did not end"
    last_ns: int = 0


def reduce(trial: Trial) -> dict[str, Any]:
    tallies = {host: Tally() for host in LEARNERS}
    notes: list[str] = []
    standstill_s, committed_ns = 0.0, 0
    last: ev.SyncerStats | None = None
    began_ns, fragments = 0, 1
    for t_ns, _, event in read_events(trial.folder):
        began_ns = began_ns or t_ns
        at = f"{int((t_ns - began_ns) / 60e9)}:{int((t_ns - began_ns) / 1e9) % 60:02d}"
        if isinstance(event, ev.Committed):
            standstill_s = max(standstill_s, (t_ns - (committed_ns or began_ns)) / 1e9)
            committed_ns = t_ns
            for learner, steps in zip(event.contributors, event.steps, strict=True):
                tally = tallies[learner]
                tally.merged += 1
                tally.steps_merged += steps / fragments
                tally.longest_gap_s = max(tally.longest_gap_s, (t_ns - (tally.last_ns or began_ns)) / 1e9)
                tally.last_ns = t_ns
        elif isinstance(event, ev.LayoutFixed):
            fragments = event.fragments
        elif isinstance(event, ev.LearnerFinished):
            tally = tallies[event.learner]
            tally.steps, tally.tokens, tally.reason = event.steps, event.tokens, event.reason
        elif isinstance(event, ev.LearnerJoined):
            tallies[event.learner].join_s = event.wait_ns / 1e9
        elif isinstance(event, ev.SyncerStats):
            last = event
        elif isinstance(event, ev.SyncerStarted):
            notes.append(f"{at} syncer, epoch {event.epoch}, {event.durability}")
        elif isinstance(event, ev.SyncerRecovered):
            notes.append(f"{at} syncer continues from {event.source} at versions {event.versions}")
        elif isinstance(event, ev.FragmentHealed):
            what = f"fragment {event.fragment}, version {event.version_before} to {event.version}"
            notes.append(f"{at} {event.learner} brings back {what}")
        elif isinstance(event, ev.MemberAside):
            notes.append(f"{at} {event.learner} is {'set aside' if event.aside else 'counted again'}: {event.reason}")
        elif isinstance(event, ev.LinkThin):
            needs, gets = event.needs_bytes_s / 125, event.gets_bytes_s / 125
            notes.append(f"{at} {event.learner}: link {event.direction} needs {needs:.0f} kbit/s, gets {gets:.0f}")
        elif isinstance(event, ev.Adapted):
            notes.append(f"{at} {adapted_text(event)}")
        elif isinstance(event, ev.MemberChanged):
            notes.append(f"{at} {event.learner} is {event.state}: {event.reason}")
        elif isinstance(event, ev.Warned):
            notes.append(f"{at} {event.source} warns: {event.text}")
    assert last is not None, "the syncer said nothing"
    return {
        "learners": tallies,
        "notes": notes,
        "standstill_s": standstill_s,
        "ledger": last,
        "loss": loss_of(trial.folder / MODEL),
        "loss_alone": loss_of(trial.folder / ALONE) if (trial.folder / ALONE).exists() else None,
        "wall_s": time.monotonic() - trial.began_s,
        "said": trial.said,
    }


def loss_of(path: Path) -> float:
    from safetensors.torch import load_file

    from atoll.zoo import eval_loss, load_corpus

    gpt = model()
    gpt.load_state_dict(load_file(path))
    return eval_loss(gpt, load_corpus("stdlib"), batch=32, seq=SEQ, batches_max=64)


def carry_out(options: argparse.Namespace, name: str) -> dict[str, Any]:
    print(f"{name}: about {options.minutes:g} minutes", flush=True)
    folder = options.out / name
    shutil.rmtree(folder, ignore_errors=True)
    with HostNet() as net:
        trial = Trial(folder, net, options.minutes, options.step_s, name == "trial", options.adaptive)
        try:
            run(trial)
        finally:
            trial.stop()
            for host in (*SYNCERS, *LEARNERS):
                trial.keep_events(host)
    return reduce(trial)


# ---------------------------------------------------------------- the report


def bound_s(options: argparse.Namespace, host: str, parameters: int, standstill_s: float) -> float:
    """What docs/HOSTS.md promises: at worst a learner fetches everything whole and then sends its progress. Whatever
    cuts it off makes it begin that anew, and adds its own length: here the longest time in which nothing of anybody was
    merged (the syncer was away), and the time for which its link was down."""
    transfer_s = (FETCH_BITS + GIVE_BITS) * parameters / LEARNERS[host]
    outage_s = standstill_s + (options.minutes * DOWN_SHARE * 60 if host == DOWN else 0.0)
    return 2 * transfer_s + outage_s + ASIDE_PERIODS * SYNC_EVERY * options.step_s


def spread(ratios: list[float]) -> str:
    """Of the pairs so far."""
    listed = ", ".join(f"{ratio:.4f}" for ratio in ratios)
    return f"{len(ratios)} pairs, trial over twin: {listed}; from {min(ratios):.4f} to {max(ratios):.4f}"


def report(options: argparse.Namespace, trial: dict[str, Any], twin: dict[str, Any], ratios: list[float]) -> str:
    parameters = sum(p.numel() for p in model().parameters())
    needs_kbit = INT4_BYTES * parameters * 8 / (SYNC_EVERY * options.step_s) / 1e3
    ratio = trial["loss"] / twin["loss"]
    command = " ".join(
        ["python benchmarks/hosts.py"]
        + [f"--minutes {options.minutes:g}"] * (options.minutes != FULL_MINUTES)
        + [f"--adaptive {options.adaptive}"] * (options.adaptive != "off")
        + ["--together"] * options.together
        + [f"--repeat {options.repeat}"] * (options.repeat > 1)
    )
    lines = [
        "# Several machines: thin links, a link that goes down, a syncer that moves twice",
        "",
        f"{datetime.date.today().isoformat()}, `{command}`: real processes on {len(LEARNERS) + len(SYNCERS) + 1} hosts "
        f"(network namespaces with tbf in both directions) of one machine with {os.cpu_count()} cores, Python "
        f"{platform.python_version()}; TLS and a token; S3 is a moto server. A byte-level GPT of {parameters:,} "
        f"parameters on the source of Python's standard library, AdamW, H = {SYNC_EVERY}, int4 both ways, "
        f"{BATCH * SEQ} tokens a step, at least {options.step_s:g} s a step. The twin has the same settings and "
        "tokens, every link at 100 Mbit/s, and no faults.",
        "",
        f"The run needs {needs_kbit:.0f} kbit/s of each learner in each direction ({INT4_BYTES} bytes x {parameters:,} "
        f"parameters each {SYNC_EVERY} steps of {options.step_s:g} s).",
        "",
        "| | trial | twin |",
        "|---|---|---|",
        f"| held-out loss of the exported model, nats per byte | {trial['loss']:.4f} | {twin['loss']:.4f} |",
        f"| trial over twin | **{ratio:.4f}** | |",
        *([f"| {spread(ratios)} | | |"] if len(ratios) > 1 else []),
    ]
    if trial["loss_alone"] is not None:
        lines.append(f"| the same, before the last learner had handed over | {trial['loss_alone']:.4f} | |")
    fates = ("tokens_processed", "tokens_merged", "tokens_pending")
    for name in fates:
        row = [f"{getattr(side['ledger'], name):,}" for side in (trial, twin)]
        lines.append(f"| {name.replace('_', ' ')} | {row[0]} | {row[1]} |")
    causes = sorted({cause for side in (trial, twin) for cause in side["ledger"].tokens_discarded})
    for cause in causes:
        row = [f"{side['ledger'].tokens_discarded.get(cause, 0):,}" for side in (trial, twin)]
        lines.append(f"| tokens discarded: {cause} | {row[0]} | {row[1]} |")
    walls = [f"{side['wall_s'] / 60:.1f}" for side in (trial, twin)]
    lines += [f"| minutes, with starting and leaving | {walls[0]} | {walls[1]} |", ""]
    lines += [
        "| learner | its link | joined in | contributions merged (twin) | longest without | bound | steps, merged |",
        "|---|---|---|---|---|---|---|",
    ]
    for host, rate in LEARNERS.items():
        own, other = trial["learners"][host], twin["learners"][host]
        bound = bound_s(options, host, parameters, trial["standstill_s"])
        link = f"{rate / 1e6:g} Mbit/s" if rate >= 1e6 else f"{rate / 1e3:g} kbit/s"
        lines.append(
            f"| {host} | {link} | {own.join_s:.1f} s | {own.merged:,} ({other.merged:,}) | {own.longest_gap_s:.0f} s | "
            f"{bound:.0f} s | {own.steps:,}, {own.steps_merged / max(1, own.steps):.0%} |"
        )
    lines += ["", bounds_text(beyond(options, trial))]
    lines += ["", "What was done to it:", "", *(f"- {text}" for text in trial["said"]), ""]
    lines += ["What its processes said (members, links, recoveries, warnings):", ""]
    lines += [f"- {text}" for text in shortened(trial["notes"])]
    return "\n".join(lines) + "\n"


def beyond(options: argparse.Namespace, trial: dict[str, Any]) -> list[str]:
    """Learners that were longer without a merged contribution than the bound allows."""
    parameters = sum(p.numel() for p in model().parameters())
    bounds = {host: bound_s(options, host, parameters, trial["standstill_s"]) for host in LEARNERS}
    return [host for host, tally in trial["learners"].items() if tally.longest_gap_s > bounds[host]]


def bounds_text(missed: list[str]) -> str:
    bits = FETCH_BITS + GIVE_BITS
    who = f"all but {', '.join(missed)}" if missed else "all"
    what = f"twice {bits} bits x parameters / rate, the longest outage, and {ASIDE_PERIODS} periods"
    return f"The bound ({what}) holds for {who}."


NOTES_MAX = 80
"""Lines of events in the report; the rest is in the folder."""


def shortened(notes: list[str]) -> list[str]:
    """The first so many notes; the same words again and again count once."""
    seen = Counter(note.partition(" ")[2] for note in notes)
    firsts: dict[str, str] = {}
    for note in notes:
        firsts.setdefault(note.partition(" ")[2], note)
    texts = [f"{note}{f' ({seen[text]} times)' if seen[text] > 1 else ''}" for text, note in firsts.items()]
    left = len(texts) - NOTES_MAX
    return texts if left <= 0 else [*texts[:NOTES_MAX], f"and {left} more"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=FULL_MINUTES)
    parser.add_argument("--step-s", type=float, default=0.6, help="least seconds of a step")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "hosts")
    parser.add_argument("--only", choices=("trial", "twin"), help="one of the two, without a report")
    parser.add_argument("--adaptive", choices=("off", "network"), default="off", help="as of `atoll syncer`")
    parser.add_argument("--together", action="store_true", help="both at the same time")
    parser.add_argument("--repeat", type=int, default=1, help="pairs of trial and twin")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(Trial(Path(), None, options.minutes, options.step_s, faults=False).steps, options.step_s)  # type: ignore[arg-type]
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out = options.out.resolve()
    kernels.warm_up()  # six processes that compile them at once, on two cores, would take a minute of the trial
    ratios: list[float] = []
    missed: list[str] = []
    for number in range(options.repeat):
        own = argparse.Namespace(**vars(options))
        own.out = options.out / f"pair-{number + 1}" if options.repeat > 1 else options.out
        missed += pair(own, ratios)
    if len(ratios) > 1:
        print(spread(ratios))
    sys.exit(1 if missed else 0)


def pair(options: argparse.Namespace, ratios: list[float]) -> list[str]:
    """One trial and its twin; returns who was beyond the bound."""
    names = [name for name in ("trial", "twin") if options.only in (None, name)]
    with ThreadPoolExecutor(len(names) if options.together else 1) as pool:
        done = dict(zip(names, pool.map(partial(carry_out, options), names), strict=True))
    for name, found in done.items():
        print(f"{name}: loss {found['loss']:.4f}, merged { ({h: t.merged for h, t in found['learners'].items()}) }")
        plain = {
            **found,
            "ledger": str(found["ledger"]),
            "learners": {h: vars(t) for h, t in found["learners"].items()},
        }
        (options.out / f"{name}.json").write_text(json.dumps(plain, indent=1))
    if len(done) == 2:
        ratios.append(done["trial"]["loss"] / done["twin"]["loss"])
        text = report(options, done["trial"], done["twin"], ratios)
        print(text)
        (options.out / "hosts.md").write_text(text)
        if options.minutes >= FULL_MINUTES:
            (ROOT / "docs" / "results" / "hosts.md").write_text(text)
    return beyond(options, done["trial"]) if "trial" in done else []


if __name__ == "__main__":
    main()
