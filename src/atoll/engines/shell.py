"""Processes as lines of a POSIX shell: quoting, environment, and a child that hears what its shell is told."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.engines.job import LaunchJob
from atoll.engines.parts import HEAD, INDEX

Variables = Mapping[str, str]
"""What stands for INDEX and HEAD in a script: shell expressions."""

RUN_CHILD = """\
told=
child=
pass_on() { told=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }
trap pass_on TERM
run_child() {
  code=0
  [ -z "$told" ] || return 0
  "$@" &
  child=$!
  while :; do
    wait "$child"; code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  wait "$child" 2>/dev/null; last=$?
  [ "$last" -eq 127 ] || code=$last
  child=
}
"""
"""SIGTERM reaches the child, and its end is waited for. A trap ends `wait` early, so that it is called again, also
after the child is gone: the shell may know its status by then, or else say 127."""


def this_python(job: LaunchJob) -> str:
    """`python` is the one that has Atoll, where the job names none and a machine has that one too: on a file system
    that all share, or on this machine. What `setup` puts in front of PATH comes later, and wins."""
    here = shlex.quote(str(Path(sys.executable).parent))
    return "" if job.run.python != "python" else f'[ ! -x {here}/python ] || export PATH={here}:"$PATH"\n'


def quoted(text: str, variables: Variables) -> str:
    """One word of a shell; INDEX and HEAD in it become expressions, everything else is taken as it is."""
    for mark, expression in variables.items():
        if mark in text:
            before, _, after = text.partition(mark)
            return f'{quoted(before, variables)}"{expression}"{quoted(after, variables)}'
    return shlex.quote(text) if text else ""


def word(text: str, variables: Variables) -> str:
    return quoted(text, variables) or "''"


def command_line(argv: Sequence[str], variables: Variables) -> str:
    return " ".join(word(one, variables) for one in argv)


def exports(environment: Mapping[str, str], variables: Variables) -> str:
    return "".join(f"export {name}={word(value, variables)}\n" for name, value in environment.items())


def numbered(index: str, head: str = "") -> Variables:
    return {INDEX: index, HEAD: head or "$(hostname)"}
