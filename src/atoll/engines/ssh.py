"""Hosts with ssh: a session of its own for each process, which outlives the connection and is found again by its mark.

Everything that is done on a host is one shell script on the standard input of `ssh HOST sh -s`. So no secret is on a
command line, here or there, and a host needs nothing but a shell, GNU grep and /proc.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from atoll.engines.files import job_files
from atoll.engines.job import LaunchJob, is_host
from atoll.engines.keyring import keys_folder, make_keys, tls_name
from atoll.engines.parts import JobPart, Places, filled, parts_of, settings_text
from atoll.engines.protocol import (
    LOG_LINES,
    STOP_ORDER,
    PartState,
    Say,
    checked_part,
    goes_on,
    learners_of,
    role_of,
    syncer_must_run,
)
from atoll.engines.shell import RUN_CHILD, command_line, exports, numbered, this_python
from atoll.engines.tools import run_tool
from atoll.errors import ConfigError, LaunchError

CONNECT_S = 15
LEAVE_S_MAX = 60
"""A learner hands over within 20 s; the syncer then writes the model."""
STEADY_S = 600
"""A process that ran for so long before it failed starts with a clean slate of restarts."""
PAUSE_S_MAX = 60
HOSTS_MAX = 10_000

KEEP = """
tries=0
while :; do
  began=$(date +%s)
  run_child {command}
  if [ -n "$told" ] || [ "$code" -eq 0 ]; then break; fi
  [ $(($(date +%s) - began)) -lt {steady} ] || tries=0
  tries=$((tries + 1))
  [ "$tries" -le {restarts} ] || break
  pause=$((tries * tries)); [ "$pause" -le {pause_max} ] || pause={pause_max}
  echo "atoll: status $code; starts again in $pause s ($tries of {restarts})"
  sleep "$pause" & child=$!; wait "$child"; child=
  [ -z "$told" ] || break
done
echo "$code" > "$folder/parts/$part.ended"
"""
"""There is no engine on a host that would start a process again, so its shell does."""

MARKED = """
here=$(cd "$folder" 2>/dev/null && pwd -P)
marked() {  # processes of this part that are alive: they carry its mark, whatever session they are in
  # Another job of the same name, of another folder or engine, is not ours.
  for file in $(grep -lzxF "ATOLL_PART=$1" /proc/[0-9]*/environ 2>/dev/null); do
    grep -qzxF "ATOLL_PART_FOLDER=$here" "$file" 2>/dev/null || continue
    pid=${file#/proc/}; pid=${pid%/environ}
    case $(sed 's/.*) //' "/proc/$pid/stat" 2>/dev/null) in Z*|X*|"") ;; *) echo "$pid" ;; esac
  done
}
keeper() {  # the shell that keeps it
  pid=$(cat "$folder/parts/$1.pid" 2>/dev/null) || return 1
  for one in $(marked "$job/$1"); do [ "$one" != "$pid" ] || echo "$pid"; done
}
"""
GPUS = """
gpus() {  # NAME COUNT: the lowest numbers of devices that no other living part of this job has
  taken=" "
  for file in "$folder"/parts/*.gpus; do
    [ -e "$file" ] || continue
    name=${file##*/}; name=${name%.gpus}
    [ "$name" = "$1" ] || [ -z "$(keeper "$name")" ] || taken="$taken$(tr , ' ' < "$file") "
  done
  number=0; chosen=; left=$2
  while [ "$left" -gt 0 ]; do
    case $taken in *" $number "*) ;; *) chosen="$chosen${chosen:+,}$number"; left=$((left - 1)) ;; esac
    number=$((number + 1))
  done
  there=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
  if [ "$there" -gt 0 ] && [ "$number" -gt "$there" ]; then
    echo "$1 needs $2 GPUs, and of the $there here too few are free" >&2; exit 1
  fi
  echo "$chosen" > "$folder/parts/$1.gpus"
}
"""
"""There is no engine on a host that would share out its devices, so the launcher does, one part after the other."""


class SshEngine:
    def __init__(self, job: LaunchJob, say: Say) -> None:
        self._job = job
        self._say = say
        self._hosts = _hosts(job)
        self._keys = keys_folder(job)
        for island in job.islands:
            if island.nodes > 1:
                raise ConfigError(f"island {island.name} has several nodes, which ssh cannot start; use Slurm or k8s")
        self._folder = job.ssh.folder or f"atoll/{job.name}"

    # ------------------------------------------------------------ what is started where

    def plan(self) -> str:
        texts = [f"# {name} on {host}\n{self._keep_script(part, name)}" for name, (part, host) in self._seats().items()]
        return "\n".join([f"# settings.json\n{settings_text(self._job)}", *texts])

    def _parts(self) -> list[JobPart]:
        places = Places(
            run="run",
            keys="keys" if self._keys is not None else "",
            settings="settings.json",
            syncer=self._job.syncer.address or f"{self._host_of_syncer()}:{self._job.syncer.port}",
            tls_name=tls_name(self._job),
            shards=self._job.shards.addresses(),
            relays=self._job.relays.reached(),
        )
        return parts_of(self._job, places)

    def _host_of_syncer(self) -> str:
        return self._job.syncer.hosts[0] if self._job.syncer.hosts else self._hosts[0]

    def _seats(self) -> dict[str, tuple[JobPart, str]]:
        """Each process with its host. An island stays where its number puts it, however many there are."""
        seats: dict[str, tuple[JobPart, str]] = {}
        turn = 0
        for part in self._parts():
            hosts = part.hosts or (self._hosts if part.role != "syncer" else (self._host_of_syncer(),))
            for index in range(part.count):
                seats[part.named(index)] = (part, hosts[(index + turn) % len(hosts)])
            turn += 1 if part.role == "island" and not part.hosts else 0
        return seats

    def _preamble(self) -> str:
        """Paths on the host are relative to its home, or from the root."""
        return f"cd && umask 077\nfolder={shlex.quote(self._folder)}\njob={shlex.quote(self._job.name)}\n{MARKED}"

    def _keep_script(self, part: JobPart, name: str) -> str:
        index = name.rpartition("-")[2] if part.role in ("island", "shard") else "0"
        environment = {key: filled(value, index) for key, value in part.environment.items()}
        command = command_line([filled(word, index) for word in part.argv], numbered(index))
        keep = KEEP.format(
            command=f"env -C {self._workdir()} {command}" if part.role == "island" else command,
            steady=STEADY_S,
            restarts=self._job.ssh.restarts,
            pause_max=PAUSE_S_MAX,
        )
        return (
            f"#!/bin/sh\n# {name} of job {self._job.name}, made by atoll launch ssh\n"
            f"part={shlex.quote(name)}\nfolder=$PWD\n"
            'echo $$ > "$folder/parts/$part.pid"\nrm -f "$folder/parts/$part.ended"\n'
            + (f"export CUDA_VISIBLE_DEVICES=$(cat parts/{shlex.quote(name)}.gpus)\n" if part.gpus else "")
            + f"{this_python(self._job)}{self._job.run.setup}\n{_from_here(exports(environment, {}))}{RUN_CHILD}{keep}"
        )

    def _workdir(self) -> str:
        return shlex.quote(self._job.run.workdir) if self._job.run.workdir else '"$folder/files"'

    # ------------------------------------------------------------ the words

    def submit(self) -> None:
        if alive := [one.name for one in self.status() if one.state == "running"]:
            raise LaunchError(f"{', '.join(alive)} of job {self._job.name} run already; stop the job first")
        seats = self._seats()
        if self._on(self._host_of_syncer(), '[ ! -e "$folder/run/state" ] || echo yes\n').strip():
            self._say(goes_on(f"{self._folder}/run on {self._host_of_syncer()}"))
        others = [*self._job.shards.hosts, *self._job.relays.hosts]
        make_keys(self._job, learners_of(self._job), [self._host_of_syncer(), *others])
        self._start(seats)

    def status(self) -> list[PartState]:
        seats = self._seats()
        found: dict[str, PartState] = {}
        silent = set()
        for host in self._hosts_in_use():
            said = self._heard(host, STATUS)
            silent |= {host} if said is None else set()
            for line in (said or "").splitlines():
                name, state, detail = line.split(" ", 2)
                where = seats[name][1] if name in seats else host
                if where == host and (name not in found or state == "running"):
                    found[name] = PartState(name, state, host, detail)
        missing = [
            PartState(name, "missing", host, "the host does not answer" if host in silent else "")
            for name, (_, host) in seats.items()
            if name not in found
        ]
        order = {name: number for number, name in enumerate(seats)}
        return sorted([*found.values(), *missing], key=lambda one: (order.get(one.name, len(order)), one.name))

    def scale(self, counts: Mapping[str, int]) -> None:
        seen = self.status()
        syncer_must_run(seen, self._job)
        before = {one.name: one for one in seen if one.state == "running"}
        wanted = SshEngine(self._job.scaled(counts), self._say)
        names = [name for name in wanted._seats() if name.rpartition("-")[0] in counts]
        going = [one for one in before.values() if one.name.rpartition("-")[0] in counts and one.name not in names]
        self._end(going)
        if missing := {name: wanted._seats()[name] for name in names if name not in before}:
            make_keys(self._job, missing)
            wanted._start(missing)

    def stop(self) -> None:
        running = [one for one in self.status() if one.state == "running"]
        for role in STOP_ORDER:
            self._end([one for one in running if role_of(one.name) == role])
        swept = {host: self._heard(host, SWEEP) for host in self._hosts_in_use()}
        if silent := [host for host, said in swept.items() if said is None]:
            raise LaunchError(f"{', '.join(silent)} does not answer, and may still run its part; stop it again later")
        if rest := " ".join(f"{host}: {said}" for host, said in swept.items() if said and said.strip()):
            raise LaunchError(f"processes do not end ({rest.strip()}); look at them on their hosts")

    def logs(self, name: str, lines: int = LOG_LINES) -> str:
        checked_part(self._job, name)
        log = f'"$folder/{LOGS}/{name}.log"'
        for host in self._hosts_in_use():
            if text := self._heard(host, f"[ ! -e {log} ] || tail -n {lines} {log}\n"):
                return text
        raise LaunchError(f"no host has a log of {name}; `atoll launch ssh status` shows what runs")

    # ------------------------------------------------------------ inside

    def _start(self, seats: Mapping[str, tuple[JobPart, str]]) -> None:
        """Files first, everywhere; then one process after the other, the syncer before its islands."""
        self._put_keys()
        for name, (part, host) in seats.items():
            devices = f"{GPUS}gpus {name} {part.gpus}\n" if part.gpus else ""
            self._on(host, self._files(part, name) + devices + START.replace("%NAME%", name))
            self._say(f"{name} on {host}")

    def _files(self, part: JobPart, name: str) -> str:
        index = name.rpartition("-")[2]
        files = {f"parts/{name}.sh": self._keep_script(part, name).encode()}
        if part.role == "syncer":
            files["settings.json"] = settings_text(self._job).encode()
        else:
            files |= {f"files/{file}": data for file, data in job_files(self._job).items()}
        files |= self._key_files(filled(file, index) for file in part.keys)
        return "mkdir -p" + "".join(f' "$folder/{sub}"' for sub in FOLDERS) + "\n" + _put(files)

    def _put_keys(self) -> None:
        """The registry goes to the syncer's host whenever it may have grown; the syncer reads it again."""
        if self._keys is not None:
            keep = 'mkdir -p "$folder/keys"\n'
            self._on(self._host_of_syncer(), keep + _put(self._key_files(["keys.json"])))

    def _key_files(self, names: Iterable[str]) -> dict[str, bytes]:
        folder = self._keys
        return {f"keys/{name}": (folder / name).read_bytes() for name in names} if folder is not None else {}

    def _end(self, going: Iterable[PartState]) -> None:
        """All are told first, then waited for: they hand over side by side."""
        going = list(going)
        for one in going:
            self._on(one.where, f"for pid in $(keeper {one.name}); do kill -TERM $pid; done\n")
        for one in going:
            said = self._on(one.where, END.replace("%NAME%", one.name).replace("%TIMES%", str(LEAVE_S_MAX * 2)))
            if said.strip():
                self._say(f"{one.name} on {one.where} did not leave within {LEAVE_S_MAX} s and was killed")

    def _hosts_in_use(self) -> list[str]:
        return list(
            dict.fromkeys([self._host_of_syncer(), *self._hosts, *(host for _, host in self._seats().values())])
        )

    def _heard(self, host: str, script: str) -> str | None:
        """The same for many hosts: None from one that does not answer, which must not hide the others."""
        try:
            return self._on(host, script)
        except LaunchError as error:
            self._say(f"{host}: {error}")
            return None

    def _on(self, host: str, script: str) -> str:
        config = ["-F", str(Path(self._job.ssh.config).expanduser())] if self._job.ssh.config else []
        options = [*config, "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_S}"]
        remedy = f"check that `ssh {host} true` works without a password"
        return run_tool(["ssh", *options, host, "sh -s"], stdin=self._preamble() + script, remedy=remedy)


LOGS = "run/logs"
"""In the run folder, where `atoll logs` and the page look for them."""
FOLDERS = ("parts", LOGS, "files", "keys/tokens")
START = """
cd "$folder" || exit 1
here=$(pwd -P)
ATOLL_PART="$job/%NAME%" ATOLL_PART_FOLDER="$here" \\
  setsid nohup sh "parts/%NAME%.sh" >> "run/logs/%NAME%.log" 2>&1 < /dev/null &
# Until its shell is there: whoever starts next must see what it has.
times=0
while [ -z "$(cd; keeper %NAME%)" ] && [ "$times" -lt 50 ]; do times=$((times + 1)); sleep 0.1; done
"""
STATUS = """
for file in "$folder"/parts/*.sh; do
  [ -e "$file" ] || continue
  name=${file##*/}; name=${name%.sh}; pid=$(keeper "$name")
  if [ -n "$pid" ]; then echo "$name running pid $pid"
  elif [ -e "$folder/parts/$name.ended" ]; then
    code=$(cat "$folder/parts/$name.ended"); state=failed; [ "$code" != 0 ] || state=ended
    echo "$name $state status $code"
  else echo "$name failed killed"; fi
done
"""
END = """
times=0
while [ -n "$(marked "$job/%NAME%")" ]; do
  times=$((times + 1))
  if [ "$times" -gt %TIMES% ]; then echo killed; kill -KILL $(marked "$job/%NAME%") 2>/dev/null; break; fi
  sleep 0.5
done
"""
SWEEP = """
all() { for file in "$folder"/parts/*.sh; do name=${file##*/}; marked "$job/${name%.sh}"; done; }
kill -KILL $(all) 2>/dev/null
times=0
while [ -n "$(all)" ] && [ "$times" -lt 20 ]; do times=$((times + 1)); sleep 0.5; done
all
"""


def _put(files: Mapping[str, bytes]) -> str:
    """Shell lines that write these files, whole or not at all. What is in them stays out of every command line."""
    lines = ""
    for name, data in files.items():
        path = f'"$folder"/{shlex.quote(name)}'  # a job's file may have any name
        text = base64.encodebytes(data).decode()
        lines += (
            f"base64 -d > {path}.partial <<'END_OF_FILE' && mv {path}.partial {path} || exit 1\n{text}END_OF_FILE\n"
        )
    return lines


def _from_here(lines: str) -> str:
    """Paths of ours that are relative to the folder, from the root: the script runs elsewhere."""
    for name in ("ATOLL_TLS_CA", "ATOLL_TOKEN_FILE", "ATOLL_RUN_FOLDER"):
        lines = lines.replace(f"export {name}=", f'export {name}="$folder"/')
    return lines


def _hosts(job: LaunchJob) -> tuple[str, ...]:
    hosts = list(job.ssh.hosts)
    if job.ssh.hosts_file:
        path = Path(job.ssh.hosts_file).expanduser()
        try:
            lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
        except OSError as error:
            raise ConfigError(f"cannot read hosts_file {path} ({error.strerror}); mend [ssh] of the job") from error
        hosts += [line for line in lines if line]
    if not hosts or len(hosts) > HOSTS_MAX or not all(map(is_host, hosts)):
        raise ConfigError(
            f"[ssh] names {len(hosts)} hosts; give 1 to {HOSTS_MAX} names as `ssh NAME` takes them, in hosts or in "
            "hosts_file, one per line"
        )
    return tuple(dict.fromkeys(hosts))
