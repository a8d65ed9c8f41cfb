"""What the commands say to people and to programs."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console


EXIT_BAD_INPUT = 2
"""What the shell's own tools use for wrong usage, and what typer uses for unknown options."""
EXIT_INTERRUPTED = 130
"""The shell's status for Ctrl-C."""


def human(*, json_wanted: bool) -> Console:
    """Where text for people goes: with --json to standard error, because standard output belongs to the program."""
    from rich.console import Console

    return Console(stderr=json_wanted, highlight=False)


def print_json(value: Any) -> None:
    """One object on one line, as the last thing on standard output. JSON has no NaN: it becomes null."""
    from atoll.launch import without_nan

    stream = sys.stdout.stream if isinstance(sys.stdout, JsonLines) else sys.stdout
    stream.write(json.dumps(without_nan(value), allow_nan=False) + "\n")
    stream.flush()


def write_raw(data: bytes) -> None:
    """Repeat what a process printed, as it is."""
    _write_bytes(sys.stdout, data)


def write_raw_aside(data: bytes) -> None:
    """The same on standard error: with --json, standard output belongs to the program."""
    _write_bytes(sys.stderr, data)


def _write_bytes(stream: TextIO, data: bytes) -> None:
    if isinstance(stream, JsonLines):
        stream.write(data.decode(errors="replace"))
    else:
        stream.buffer.write(data)
        stream.buffer.flush()


def print_error(text: str) -> None:
    """One clear message on standard error, red on a terminal."""
    from rich.console import Console
    from rich.text import Text

    message = Text("atoll: ", style="bold red")
    message.append(text, style="red")
    Console(stderr=True, highlight=False, soft_wrap=True).print(message)


def warn(text: str) -> None:
    """The same for what is unwise and goes on, in yellow."""
    from rich.console import Console

    Console(stderr=True, highlight=False, soft_wrap=True).print(f"atoll: {text}", style="yellow", markup=False)


class JsonLines(io.TextIOBase):
    """A stream that makes one JSON object of each line that is printed to it: {"time", "level", "text"}."""

    def __init__(self, stream: TextIO, level: str) -> None:
        self.stream = stream
        self._level = level
        self._held = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
            for line in lines:
                self.stream.write(json.dumps(self._object(line)) + "\n")
        return len(text)

    def flush(self) -> None:
        self.stream.flush()

    def fileno(self) -> int:
        return self.stream.fileno()

    def isatty(self) -> bool:
        return False

    def _object(self, line: str) -> dict[str, str]:
        moment = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        text = re.sub(r"^\d\d:\d\d:\d\d  ", "", line)
        level = "warning" if self._level == "info" and re.match(r"(atoll syncer: )?warning", text) else self._level
        return {"time": moment, "level": level, "text": text}


@contextlib.contextmanager
def logged_as(log_format: str, *, aside: str = "error") -> Iterator[None]:
    """With "json", what this process prints is one JSON object for each line. `aside` is the level of what goes to
    standard error: a command whose standard output belongs to others talks there."""
    from atoll.errors import ConfigError

    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format is text or json, not {log_format!r}; give one of them")
    if log_format == "text":
        yield
        return
    out, error = JsonLines(sys.stdout, "info"), JsonLines(sys.stderr, aside)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield


def save_text(option: str, path: Path, text: str) -> None:
    """What `option` writes; a file that is there is replaced by a whole one or not at all."""
    from errno import ENOENT, ENOSPC

    from atoll.errors import ConfigError
    from atoll.launch import write_text

    try:
        if path.is_relative_to("/dev"):  # /dev/stdout, /dev/null: nothing to put in their place
            path.write_text(text, encoding="utf-8")
        else:
            write_text(path.resolve(), text)
    except OSError as error:
        places = {ENOENT: "give a file in a folder that exists", ENOSPC: "make room, or give a file elsewhere"}
        remedy = places.get(error.errno or 0, "give a file that can be written")
        raise ConfigError(f"{option} {path}: {error.strerror}; {remedy}") from None


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """`kill` is Ctrl-C: what is under way ends in order."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
