"""Results of runs in one file: a line of JSON for each, only ever appended.

- A line is written whole and synced before `append` returns; several processes may append (a lock on the file).
- A crash can leave the last line torn. Readers pass over it and the next append takes its place: it was never promised.
- Any other line that cannot be read means that somebody or something has damaged the file, and is refused.
- Of several lines with one key the newest counts, so a run that is repeated replaces its result.
- Whoever runs a spec claims its key, so that several processes share the work: a lock, which ends with its process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import platform
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, StoreError
from atoll.instruments.lab.spec import LabResult

STORE_FORMAT = 1
OPEN_TRIES = 100
CLAIMS_SUFFIX = ".claims"
"""Of the folder beside a store in which the runs under way have a file each. It is gone when nobody runs anything; what
kill -9 leaves of it is harmless, and taken over by whoever does that run."""
LINE_BYTES_MAX = 4_000_000
"""A result of 10,000 evaluations and as many learners' steps fits; anything longer is no result."""
RECORDS_MAX = 1_000_000
"""Lines of one file: at 3 kB each what a reader would still hold in memory."""
TEXT_CHARS_MAX = 200
"""Of labels and of the machine's name."""


_BEGIN = b'{"format"'
"""What every line begins with."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One finished run, as the file has it. The numbers are those of LabResult."""

    key: str
    study: str
    label: str
    when: str
    """UTC, ISO 8601."""
    machine: str
    loss: float
    curve: tuple[tuple[int, float], ...]
    tokens: int
    virtual_s: float
    wall_s: float
    tokens_per_s: float
    spec: Mapping[str, Any]
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, result: LabResult, *, study: str = "", label: str = "") -> RunRecord:
        return cls(
            key=result.spec.key,
            study=study,
            label=label,
            when=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=str(result.facts.get("device") or platform.machine())[:TEXT_CHARS_MAX],
            loss=result.loss,
            curve=tuple(result.curve),
            tokens=result.tokens,
            virtual_s=result.virtual_s,
            wall_s=result.wall_s,
            tokens_per_s=result.tokens_per_s,
            spec=result.spec.to_dict(),
            facts=dict(result.facts),
        )

    def fact(self, name: str) -> float:
        """A number of `facts`, by its name or a path such as steps.learner-0; NaN where there is none."""
        value: Any = self.facts
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) else math.nan


class ResultStore:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def records(self) -> dict[str, RunRecord]:
        """The newest of every key; none when there is no file yet."""
        try:
            with self.path.open("rb") as file:
                return {record.key: record for record in _read(file, self.path)}
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._unusable("read", error) from None

    def check(self) -> None:
        """Raise now what `append` would raise after an hour of training. A file that is not there is not made."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(self.path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, "its folder cannot be written to")
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
            except FileNotFoundError:
                return
            try:
                _check_begin(descriptor, self.path)
                _end(descriptor, self.path)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise self._unusable("written", error) from None

    def append(self, record: RunRecord) -> None:
        """Add one line, durably."""
        line = _line(record)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._unusable("written", error) from None
        try:
            with _locked(descriptor):
                _check_begin(descriptor, self.path)
                end = _mended_end(descriptor, self.path)
                _write(descriptor, line, end)
        except OSError as error:
            raise StoreError(
                f"the result of {record.label or record.key} could not be written to {self.path} ({error.strerror}); "
                "make room there, or give another --store, and run the study again"
            ) from None
        finally:
            os.close(descriptor)

    @contextlib.contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """True inside if nobody else has claimed this run. Look at the records then: it may just have been finished."""
        file = self.path.with_name(self.path.name + CLAIMS_SUFFIX) / key
        descriptor, mine = self._take(file)
        try:
            yield mine
        finally:
            with contextlib.suppress(OSError):
                if mine:
                    file.unlink()
                file.parent.rmdir()
            os.close(descriptor)

    def _take(self, file: Path) -> tuple[int, bool]:
        """A claim, open, and whether it is ours."""
        while True:
            try:
                descriptor = _open_in_folder(file)
            except OSError as error:
                raise self._unusable("written", error) from None
            try:
                mine = _try_lock(descriptor)
                if not mine or _is_at(descriptor, file):
                    return descriptor, mine
            except OSError as error:
                os.close(descriptor)
                raise self._unusable("locked", error) from None
            os.close(descriptor)  # whoever had it removed it between our opening and our lock

    def _unusable(self, how: str, error: OSError) -> ConfigError:
        return ConfigError(f"the store {self.path} cannot be {how} ({error.strerror}); give another file with --store")


# ---------------------------------------------------------------- lines


def _line(record: RunRecord) -> bytes:
    values = {name: getattr(record, name) for name in RunRecord.__slots__}
    body = json.dumps(_plain(values), allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    data = json.dumps({"format": STORE_FORMAT, "crc": zlib.crc32(body.encode())})[:-1] + ', "run": ' + body + "}\n"
    line = data.encode()
    if len(line) > LINE_BYTES_MAX:
        raise StoreError(
            f"the result of {record.label or record.key} has {len(line)} bytes, and a line of the store has at most "
            f"{LINE_BYTES_MAX}; evaluate less often (evals)"
        )
    return line


def _parse(line: bytes) -> RunRecord:
    """A line back into a record. ValueError, TypeError or KeyError when it is none."""
    values = json.loads(line)
    if not isinstance(values, dict) or values.get("format") != STORE_FORMAT:
        raise ValueError(f"it is not of format {STORE_FORMAT}")
    run = values["run"]
    body = json.dumps(run, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    if zlib.crc32(body.encode()) != values["crc"]:
        raise ValueError("its checksum does not fit its content")
    texts: dict[str, Any] = {name: str(run[name]) for name in ("key", "study", "label", "when", "machine")}
    numbers: dict[str, Any] = {name: _number(run[name]) for name in ("loss", "virtual_s", "wall_s", "tokens_per_s")}
    return RunRecord(
        **texts,
        **numbers,
        tokens=int(run["tokens"]),
        curve=tuple((int(tokens), _number(loss)) for tokens, loss in run["curve"]),
        spec=dict(run["spec"]),
        facts=dict(run["facts"]),
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: a loss that is neither is written as null and read as NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int) else str(value)


def _read(file: Any, path: Path) -> Iterator[RunRecord]:
    for number in range(1, RECORDS_MAX + 2):
        line = file.readline(LINE_BYTES_MAX + 1)
        if not line:
            return
        if number > RECORDS_MAX:
            raise StoreError(f"{path} has more than {RECORDS_MAX} lines; begin a new file with --store")
        try:
            if len(line) > LINE_BYTES_MAX:
                raise ValueError(f"it has more than {LINE_BYTES_MAX} bytes")
            yield _parse(line)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if not line.endswith(b"\n") and len(line) <= LINE_BYTES_MAX:
                return  # torn by a crash, and therefore the last
            raise StoreError(
                f"{path}, line {number} is damaged ({_reason(error)}); delete it, and the study will run it again"
            ) from None


def _reason(error: Exception) -> str:
    return f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)[:120]


# ---------------------------------------------------------------- bytes


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _open_in_folder(file: Path) -> int:
    """Another process may remove the folder, while it is empty, between its making and the opening."""
    for _ in range(OPEN_TRIES):
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    raise FileNotFoundError(errno.ENOENT, "its folder is removed again and again", str(file))


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, file: Path) -> bool:
    """True if that name is still this very file's."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _check_begin(descriptor: int, path: Path) -> None:
    """A file of some other kind is not touched."""
    if not _BEGIN.startswith(os.pread(descriptor, len(_BEGIN), 0)):
        raise StoreError(f"{path} is not a store of results; give another --store")


def _mended_end(descriptor: int, path: Path) -> int:
    """Where the next line goes. A torn last line is cut off; a whole one that only lacks its end of line gets it."""
    end, unended = _end(descriptor, path)
    if unended:
        os.pwrite(descriptor, b"\n", end)
        return end + 1
    os.ftruncate(descriptor, end)
    return end


def _end(descriptor: int, path: Path) -> tuple[int, bool]:
    """Where the whole lines end, and whether the last of them lacks its end of line. Beyond it is what a crash tore."""
    size = os.fstat(descriptor).st_size
    tail = os.pread(descriptor, LINE_BYTES_MAX + 1, max(0, size - LINE_BYTES_MAX - 1))
    begin = tail.rfind(b"\n") + 1
    last = tail[begin:]
    if not last:
        return size, False
    if begin == 0 and len(tail) > LINE_BYTES_MAX:
        raise StoreError(f"{path} does not end with a line of results; it is some other file, so give another --store")
    try:
        _parse(last)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        if not last.startswith(_BEGIN[: len(last)]) and last.strip(b"\0"):  # zeros: of a machine that lost power
            raise StoreError(
                f"{path} does not end with a line of results; it is some other file, so give another --store"
            ) from None
        return size - len(last), False
    return size, True


def _write(descriptor: int, line: bytes, at: int) -> None:
    view = memoryview(line)
    while view:
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written
    os.fsync(descriptor)
