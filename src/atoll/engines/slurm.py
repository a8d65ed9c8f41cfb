"""Slurm: a job for the syncer, an array for each kind of islands and for shards. Nothing is kept here: squeue knows
them by name.

An island that gets SIGTERM (preempted, or near its time limit) leaves in order, and its script puts the job back into
the queue; a file in the run folder says when it shall not come back. A syncer that is taken away is killed, because
SIGTERM would end the run: it comes back from its last commit, maybe on another node, and RUN/syncer.json says where.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.engines.files import put_files
from atoll.engines.job import LaunchJob
from atoll.engines.keyring import keys_folder, make_keys, tls_name
from atoll.engines.parts import INDEX, JobPart, Places, parts_of, settings_text
from atoll.engines.protocol import (
    LOG_LINES,
    STOP_ORDER,
    PartState,
    Say,
    checked_part,
    goes_on,
    learners_of,
    names_of,
    syncer_must_run,
)
from atoll.engines.shell import RUN_CHILD, command_line, exports, numbered, this_python, word
from atoll.engines.tools import run_tool, wait_until
from atoll.errors import ConfigError, LaunchError
from atoll.launch import RunFolder, how_it_ended, write_text
from atoll.private import make_private_folder

REMEDY = "run this on a login node of the cluster, and see `sinfo`"
SQUEUE = ("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%j|%i|%T|%N|%r")
LEAVE_S_MAX = 60.0
"""A learner hands over within 20 s; the syncer then writes the model."""
KILL_S_MAX = 120.0
"""Slurm itself kills KillWait (30 s) after a cancel."""
RESTARTS_MAX = 20
"""How often Slurm starts an island again that fails; SLURM_RESTART_COUNT counts, preemptions included."""
SYNCER_WAIT_S_MAX = 3600
"""An island is not started before its syncer is. One that has not said by then where it is will not."""
SYNCER_NOTICE_S = 60
"""Before its time limit a syncer is killed and put back into the queue; a commit takes less."""
NO_REASON = "None"
"""What squeue says where it has nothing to say."""
_ALIVE = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STOPPED")
_WORDS = {"PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "RUNNING": "running"}
_WORDS |= {"COMPLETING": "running", "COMPLETED": "ended", "CANCELLED": "ended"}

SYNCER_FAILED = "syncer.failed"
"""In the run folder: why there will be no syncer."""
AWAIT_SYNCER = """\
waited=0
until [ -s {told} ] || [ -n "$told" ]; do
  sleep 1; waited=$((waited + 1)); why=
  if [ -s {failed} ]; then why="$(cat {failed})"; fi
  if [ "$waited" -gt {most} ]; then why="no syncer within {most} s"; fi
  if [ -n "$why" ]; then echo "atoll: $why; see syncer.log beside this one, and submit the job again" >&2; exit 1; fi
done
"""


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """One line of squeue."""

    job: str
    """What scancel takes: 12, or 12_3 for one of an array."""
    part: str
    index: int
    state: str
    nodes: str
    reason: str

    @property
    def alive(self) -> bool:
        return self.state in _ALIVE

    @property
    def number(self) -> int:
        """Slurm counts its jobs up: of two that ended, the higher one was the later."""
        return int(self.job.partition("_")[0])


class SlurmEngine:
    def __init__(self, job: LaunchJob, say: Say) -> None:
        self._job = job
        self._say = say
        self._run = Path(job.run.folder or f"runs/{job.name}").expanduser().resolve()
        beside = self._run / "files" if job.run.files else Path.cwd()
        self._workdir = Path(job.run.workdir).expanduser().resolve() if job.run.workdir else beside
        keys = keys_folder(job)
        self._places = Places(
            run=str(self._run),
            keys=str(keys) if keys is not None else "",
            settings=str(self._run / "settings.json"),
            syncer=job.syncer.address or f"@{self._run}/syncer.json",
            tls_name=tls_name(job),
            shards=job.shards.addresses(),
            relays=job.relays.reached(),
        )

    # ------------------------------------------------------------ what is submitted

    def plan(self) -> str:
        groups = [(part, group) for part in self._parts() if part.count for group in self._groups(part, None)]
        scripts = [f"# sbatch < {part.name}\n{self.script(part, *group)}" for part, group in groups]
        return "\n".join([f"# {self._run}/settings.json\n{settings_text(self._job)}", *scripts])

    def script(self, part: JobPart, indices: Iterable[int] | None = None, hosts: Sequence[str] = ()) -> str:
        """A batch script for these numbers of a part; all of them if none are named. On `hosts`, if there are any."""
        variables = numbered("${SLURM_ARRAY_TASK_ID:-0}")
        lines = ["#!/bin/sh", *(f"#SBATCH {option}" for option in self._options(part, indices, hosts)), "umask 077"]
        lines += [this_python(self._job) + self._job.run.setup]
        lines.append(exports(part.environment, variables) + RUN_CHILD)
        lines.append(f"gone={word(str(self._run / 'leaving' / part.named(INDEX)), variables)}")
        lines.append(f"stopping={word(str(self._run / 'stopping'), variables)}")
        bodies = {"syncer": self._syncer_body, "island": self._body}
        bodies |= {"shard": self._served_body, "relay": self._served_body}
        lines.append(bodies[part.role](part))
        return "\n".join(lines)

    def _options(self, part: JobPart, indices: Iterable[int] | None, hosts: Sequence[str]) -> list[str]:
        own = self._job.slurm
        chosen = list(range(part.count)) if indices is None else list(indices)
        array = not part.is_alone
        log = self._run / "logs" / (part.named("%a") + ".log")
        partition = own.partition
        if part.role == "syncer":
            partition = own.syncer_partition or partition
        elif part.spot:
            partition = own.spot_partition or partition
        given = {
            "job-name": self._name(part),
            "array": ",".join(map(str, chosen)) if array else "",
            "output": str(log),
            "chdir": str(self._workdir),
            "partition": partition,
            "account": own.account,
            "qos": own.qos,
            "time": own.time,
            "signal": f"B:USR1@{SYNCER_NOTICE_S}" if part.role == "syncer" else f"B:TERM@{own.leave_s}",
            "nodes": str(part.nodes),
            "ntasks-per-node": "1",
            "cpus-per-task": str(part.cpus),
            "mem": f"{round(part.memory_gb * 1024)}M" if part.memory_gb else "",
            "gres": f"gpu:{part.hardware + ':' if part.hardware else ''}{part.gpus}" if part.gpus else "",
            "constraint": part.site,
            "nodelist": ",".join(hosts),
        }
        for name, value in given.items():
            if any(sign.isspace() for sign in value):
                raise ConfigError(f"--{name}={value!r} has a space in it, which sbatch would not take; choose another")
        for option in own.options:
            if not option.isprintable():
                raise ConfigError(f"the option {option!r} in [slurm] has more than one line; give each by itself")
        return [*(f"--{n}={v}" for n, v in given.items() if v), "--requeue", "--open-mode=append", *own.options]

    def _body(self, part: JobPart) -> str:
        variables = numbered("${SLURM_ARRAY_TASK_ID:-0}", "$head")
        head = 'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n' if part.nodes > 1 else ""
        srun = f"srun --nodes={part.nodes} --ntasks={part.nodes} --cpus-per-task={part.cpus} --kill-on-bad-exit=1"
        return (
            # The last number of an array has the array's own job number, which means all of them to Slurm's tools.
            'self="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"\n'
            # srun takes SIGTERM for an order to kill its tasks, so the step is told past it.
            'pass_on() { told=1; scancel --quiet --signal=TERM "$self"; }\n'
            + f"{self._await_syncer()}{head}run_child {srun} -- {command_line(part.argv, variables)}\n"
            'if [ -e "$stopping" ] || [ -e "$gone" ]; then exit "$code"; fi\n'
            # Taken away or failed: the same job again. One that ended by itself is done. At a preemption Slurm tells
            # the step itself, and not its shell.
            "! scontrol show job --oneliner \"$self\" | grep -q ' PreemptTime=[0-9]' || told=1\n"
            f'[ "$code" -eq 0 ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge {RESTARTS_MAX} ] || told=1\n'
            'if [ -n "$told" ]; then\n'
            '  echo "atoll: back into the queue (status $code)"\n'
            '  scontrol requeue "$self"\n'
            "fi\n"
            'exit "$code"\n'
        )

    def _syncer_body(self, part: JobPart) -> str:
        command = command_line(part.argv, numbered("0"))
        told = word(str(self._run / "syncer.json"), {})
        others = [self._name(part) for part in self._parts() if part.role in ("shard", "relay")]
        ends = "".join(f"scancel --quiet --batch --signal=TERM --name={name}; " for name in others)
        end_others = f'touch "$stopping"; {ends}' if others else ""
        give_up = f'echo "its syncer ended with status $code" > {self._failed_file()}; {end_others}exit "$code"'
        return (
            'taken() { told=1; how=KILL; [ ! -e "$stopping" ] || how=TERM; kill -$how $child; }\n'
            "trap taken TERM USR1\n"
            f"run_child {command}\n"
            # One that never listened would not do so the next time either: islands are told, and nobody waits.
            f'[ "$code" -eq 0 ] || [ -n "$told" ] || [ -s {told} ] || {{ {give_up}; }}\n'
            f'[ "$code" -eq 0 ] || [ "${{SLURM_RESTART_COUNT:-0}}" -ge {RESTARTS_MAX} ] || told=1\n'
            'if [ -n "$told" ] && [ ! -e "$stopping" ]; then scontrol requeue "$SLURM_JOB_ID"; exit "$code"; fi\n'
            f'{end_others}exit "$code"\n'
        )

    def _await_syncer(self) -> str:
        """Shell lines that wait until the syncer has said where it is, if that is not known before."""
        if self._places.syncer != f"@{self._run}/syncer.json":
            return ""
        told = word(str(self._run / "syncer.json"), {})
        return AWAIT_SYNCER.format(told=told, failed=self._failed_file(), most=SYNCER_WAIT_S_MAX)

    def _served_body(self, part: JobPart) -> str:
        """A shard ends by SIGTERM with everything on disk, and goes on from there. It and a relay need the same node,
        whose name the others know them by. They outlive the run until the syncer has the model."""
        number = "$SLURM_JOB_ID" if part.is_alone else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        return (
            f'self="{number}"\n{self._await_syncer() if part.role == "relay" else ""}'
            f"run_child {command_line(part.argv, numbered('${SLURM_ARRAY_TASK_ID:-0}'))}\n"
            'if [ -e "$stopping" ]; then exit "$code"; fi\n'
            f'[ -z "$told" ] && [ "${{SLURM_RESTART_COUNT:-0}}" -ge {RESTARTS_MAX} ] || scontrol requeue "$self"\n'
            'exit "$code"\n'
        )

    # ------------------------------------------------------------ the words

    def submit(self) -> None:
        if alive := [entry for entry in self._queue() if entry.alive]:
            raise LaunchError(
                f"job {self._job.name} is in the queue already ({alive[0].part}, Slurm job {alive[0].job}); see "
                f"`atoll launch slurm status`, and stop it before it is submitted again"
            )
        if (self._run / "state").exists():
            self._say(goes_on(str(self._run)))
        make_keys(self._job, learners_of(self._job), [*self._job.shards.hosts, *self._job.relays.hosts])
        for folder in (self._run, self._run / "logs", self._run / "leaving"):
            make_private_folder(folder)
        put_files(self._job, self._run / "files")
        for path in [self._run / "stopping", self._run / SYNCER_FAILED, *(self._run / "leaving").iterdir()]:
            path.unlink(missing_ok=True)
        write_text(self._run / "settings.json", settings_text(self._job))
        syncer, *others = self._parts()
        number = self._submit(syncer, None)
        for part in others:
            if part.count:
                self._submit(part, None, after=number)

    def status(self) -> list[PartState]:
        latest: dict[str, PartState] = {}
        for entry in sorted(self._queue(), key=lambda entry: (entry.alive, entry.number)):  # what counts comes last
            one = self._state(entry)
            latest[one.name] = one
        missing = [self._forgotten(name) for name in names_of(self._job) if name not in latest]
        return sorted([*latest.values(), *missing], key=lambda one: _order(one.name))

    def _forgotten(self, name: str) -> PartState:
        """Slurm forgets a job some minutes after its end. The run folder says whether that was the end of the run."""
        ended = how_it_ended(RunFolder(self._run))
        return PartState(name, "missing") if ended is None else PartState(name, "ended", detail=f"run: {ended.reason}")

    def scale(self, counts: Mapping[str, int]) -> None:
        syncer_must_run(self.status(), self._job)
        for name, count in counts.items():
            part = next(part for part in self._parts() if part.name == name and part.role == "island")
            here = {entry.index: entry for entry in self._queue() if entry.alive and entry.part == name}
            self._leave([entry for index, entry in here.items() if index >= count])
            if missing := [index for index in range(count) if index not in here]:
                make_keys(self._job, [part.named(index) for index in missing])
                for index in missing:
                    (self._run / "leaving" / part.named(index)).unlink(missing_ok=True)
                syncer = [entry.job for entry in self._queue() if entry.alive and entry.part == "syncer"]
                self._submit(part, missing, after=syncer[0] if syncer else "")

    def stop(self) -> None:
        make_private_folder(self._run)
        (self._run / "stopping").touch()
        for role in STOP_ORDER:
            going = [entry for entry in self._queue() if entry.alive and self._part(entry.part).role == role]
            self._leave(going)
            if role == "syncer" and any(entry.state == "PENDING" for entry in going):
                self._say(f"the syncer waited in the queue; `atoll export {self._run} --to FILE` writes the model")
            self._wait_gone({entry.job for entry in going}, LEAVE_S_MAX)
        if rest := [entry.job for entry in self._queue() if entry.alive]:
            self._say(f"{', '.join(rest)} did not end in order and will be killed")
            run_tool(["scancel", *rest], remedy=REMEDY)
            if not self._wait_gone(set(rest), KILL_S_MAX):
                raise LaunchError(f"Slurm has not ended {', '.join(rest)}; look at `squeue`, and ask its operator")

    def logs(self, name: str, lines: int = LOG_LINES) -> str:
        path = self._run / "logs" / f"{checked_part(self._job, name)}.log"
        try:
            return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
        except OSError as error:
            raise LaunchError(f"there is no log {path} ({error.strerror}); {name} may still wait for a node") from None

    # ------------------------------------------------------------ inside

    def _parts(self) -> list[JobPart]:
        return parts_of(self._job, self._places)

    def _part(self, name: str) -> JobPart:
        return next(part for part in self._parts() if part.name == name)

    def _name(self, part: JobPart) -> str:
        return f"atoll-{self._job.name}-{part.name}"

    def _submit(self, part: JobPart, indices: Sequence[int] | None, after: str = "") -> str:
        """An island begins `after` this job has, so that it keeps no node while its syncer still waits for one."""
        words = ["sbatch", "--parsable", *([f"--dependency=after:{after}"] if after else [])]
        number = ""
        for group, hosts in self._groups(part, indices):
            number = run_tool(words, stdin=self.script(part, group, hosts), remedy=REMEDY).strip()
            which = "" if part.is_alone else f" ({len(group)})"
            self._say(f"{part.name}{which}: Slurm job {number}")
        return number

    def _groups(self, part: JobPart, indices: Sequence[int] | None) -> list[tuple[list[int], Sequence[str]]]:
        """Numbers of a part that one batch job takes, with its nodes. Slurm gives a job all the nodes that it names, so
        islands that are to share more nodes than one has take them in turn."""
        chosen = list(range(part.count)) if indices is None else list(indices)
        places = [part.hosts[at : at + part.nodes] for at in range(0, len(part.hosts), part.nodes)]
        if part.is_alone or len(places) <= 1:
            return [(chosen, places[0] if places else ())]
        whole = [place for place in places if len(place) == part.nodes]
        turns = [([i for i in chosen if i % len(whole) == turn], place) for turn, place in enumerate(whole)]
        return [(group, place) for group, place in turns if group]

    def _state(self, entry: QueueEntry) -> PartState:
        part, state = self._part(entry.part), _WORDS.get(entry.state, "failed")
        detail = f"Slurm job {entry.job}" + (f", {entry.reason}" if entry.reason != NO_REASON else "")
        if state == "running" and part.role == "island" and not (self._run / "syncer.json").exists():
            detail += ", waits for the syncer"
        if state == "failed" and part.role == "syncer":
            detail += f"; see {self._run}/logs/syncer.log"
        return PartState(part.named(entry.index), state, entry.nodes, detail)

    def _failed_file(self) -> str:
        return word(str(self._run / SYNCER_FAILED), {})

    def _queue(self) -> list[QueueEntry]:
        """Every array element on its own, those that have ended as long as Slurm remembers them."""
        names = {self._name(part): part.name for part in self._parts()}
        text = run_tool(
            [*SQUEUE, f"--name={','.join(names)}"],
            remedy=REMEDY,
        )
        entries = []
        for line in text.splitlines():
            name, job, state, nodes, reason = line.split("|", 4)
            index = re.search(r"_(\d+)$", job)
            if name in names:
                number = int(index[1]) if index else 0
                entries.append(QueueEntry(job, names[name], number, state, nodes, reason))
        return entries

    def _leave(self, entries: Sequence[QueueEntry]) -> None:
        """Not to come back: those that wait are taken from the queue, those that run leave in order."""
        for entry in entries:
            (self._run / "leaving" / self._part(entry.part).named(entry.index)).touch()
        if waiting := [entry.job for entry in entries if entry.state == "PENDING"]:
            run_tool(["scancel", *waiting], remedy=REMEDY)
        self._tell([entry for entry in entries if entry.state != "PENDING"])

    def _tell(self, entries: Sequence[QueueEntry]) -> None:
        for entry in entries:
            with contextlib.suppress(LaunchError):  # it may have ended by itself
                run_tool(["scancel", "--batch", "--signal=TERM", entry.job], remedy=REMEDY)

    def _wait_gone(self, jobs: set[str], timeout_s: float) -> bool:
        return wait_until(lambda: not any(entry.alive and entry.job in jobs for entry in self._queue()), timeout_s)


def _order(name: str) -> tuple[bool, str, int]:
    kind, _, number = name.rpartition("-")
    return (name != "syncer", kind or name, int(number) if number.isdigit() else 0)
