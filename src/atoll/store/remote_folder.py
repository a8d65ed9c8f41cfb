"""A folder somewhere: on a local disk, in a bucket, in memory. The little that snapshots need of fsspec, with one kind
of error.

Local files are synced and renamed into place. Elsewhere a file is complete when its upload was closed without an error.
Whatever a backend raises comes out as an OSError, because callers treat them all alike: say so, and try again later.
Libraries like to quote the address that they tried. So every message goes through `redacted`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import ConfigError, PayloadError, StoreError
from atoll.private import redacted
from atoll.store import failpoints, files

PART_BYTES = 32 << 20
"""Bytes per uploaded part and per ranged read: S3 takes parts from 5 MiB and at most 10,000, so files up to 320 GB."""
EXTRAS = {"s3": "'atoll[s3]'", "s3a": "'atoll[s3]'"}
"""What to install for a scheme, where we have an extra for it."""


ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "s3a": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")}
"""Where a scheme's library finds its endpoint, if no option names one."""
REASON_CHARS_MAX = 200
"""A sentence of a library; what comes after it is the request in full."""


def unreachable(url: str, options: Mapping[str, Any] | None, error: OSError) -> StoreError:
    """What a place that cannot be read means to whoever named it, in one sentence."""
    reason = redacted((error.strerror or str(error)).splitlines()[0])[:REASON_CHARS_MAX]
    endpoint = _endpoint(url, options or {})
    where = f"endpoint {endpoint}; " if endpoint else ""
    checks = "that it answers, the name of the bucket, the credentials" if "://" in url else "that it is mounted"
    return StoreError(
        f"the snapshot location {redacted(url)} cannot be reached ({where}{reason}): check the URL, {checks}"
        f"{' and --snapshot-options' if '://' in url else ''}"
    )


def _endpoint(url: str, options: Mapping[str, Any]) -> str:
    more = options.get("client_kwargs")
    given = options.get("endpoint_url") or (more.get("endpoint_url") if isinstance(more, Mapping) else "")
    names = ENDPOINTS.get(url.partition("://")[0], ())
    return redacted(str(given or next((os.environ[name] for name in names if os.environ.get(name)), "")))


class RemoteFolder:
    """The folder at `url`. Names are relative to it."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url = redacted(url.rstrip("/")) if "://" in url else str(Path(url))
        """For people: without a password."""
        self._fs, root = _open_filesystem(url, dict(options or {}))
        self._root = root.rstrip("/") or "/"
        protocol = self._fs.protocol
        self._local = "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def folders(self) -> list[str]:
        """Names of the folders in here; none if the place does not exist yet."""
        return sorted(name for name, entry in self._list("").items() if entry["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        """The files in a folder and their sizes, in one call."""
        return {name: int(entry["size"]) for name, entry in self._list(folder).items() if entry["type"] == "file"}

    def _list(self, folder: str) -> dict[str, dict[str, Any]]:
        with _os_errors(self._told(folder)):
            self._fs.invalidate_cache()
            try:
                entries = self._fs.ls(self._path(folder).rstrip("/") or "/", detail=True)
            except FileNotFoundError:
                return {}
        return {str(entry["name"]).rstrip("/").rpartition("/")[2]: entry for entry in entries}

    def size(self, name: str) -> int | None:
        """The size of a file, or None if there is no such file."""
        with _os_errors(self._told(name)):
            self._fs.invalidate_cache()
            try:
                found = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(found["size"]) if found.get("type") == "file" else None

    def read(self, name: str, size: int) -> NDArray[np.uint8]:
        """Exactly `size` bytes, in memory of their own. Raises PayloadError if the file has fewer."""
        target = np.empty(size, np.uint8)
        with _os_errors(self._told(name)):
            if self._local:
                with files.opened(Path(self._path(name)), os.O_RDONLY) as descriptor:
                    done = files.read_into(descriptor, target.data, 0)
            else:
                done = self._read_ranges(name, target)
        if done < size:
            raise PayloadError(f"{name} has {done} bytes instead of {size}")
        return target

    def _read_ranges(self, name: str, target: NDArray[np.uint8]) -> int:
        for start in range(0, target.nbytes, PART_BYTES):
            stop = min(start + PART_BYTES, target.nbytes)
            part = self._fs.cat_file(self._path(name), start=start, end=stop)
            if len(part) != stop - start:
                return start + len(part)
            target[start:stop] = np.frombuffer(part, np.uint8)
        return target.nbytes

    def write(self, name: str, parts: Iterable[files.Buffer], points: str) -> tuple[int, str]:
        """Write a file from its parts; returns its size and the xxh3-64 of its bytes."""
        digest, size = xxhash.xxh3_64(), 0
        with _os_errors(self._told(name)), self._sink(name, points) as sink:
            for part in parts:
                digest.update(part)
                size += memoryview(part).nbytes
                sink.write(part)
        return size, digest.hexdigest()

    def _sink(self, name: str, points: str) -> files.Replacement | _Upload:
        if not self._local:
            return _Upload(self._fs, self._path(name), points)
        path = Path(self._path(name))
        files.make_folders(path.parent, f"{points}.folder.sync")
        return files.Replacement(path, points)

    def read_small(self, name: str, bytes_max: int) -> bytes | None:
        """The first bytes of a small file, None if there is none."""
        with _os_errors(self._told(name)):
            try:
                return bytes(self._fs.cat_file(self._path(name), start=0, end=bytes_max))
            except FileNotFoundError:
                return None

    def put_small(self, name: str, data: bytes) -> None:
        """Write a small file whole, over the one that is there."""
        with _os_errors(self._told(name)):
            if self._local:
                with _beside(Path(self._path(name)), data) as temporary:
                    temporary.replace(self._path(name))
            else:
                self._fs.pipe_file(self._path(name), data)

    def create_small(self, name: str, data: bytes) -> bool | None:
        """Write a small file that must not exist yet: True if it was ours to write, False if there is one. None where
        the place cannot tell two writers apart: the caller looks again who was last."""
        path = self._path(name)
        with _os_errors(self._told(name)):
            try:
                if self._local:
                    Path(path).parent.mkdir(parents=True, exist_ok=True)
                    with _beside(Path(path), data) as temporary:
                        os.link(temporary, path)
                else:
                    self._fs.pipe_file(path, data, mode="create")
                return True
            except FileExistsError:
                return False
            except Exception:  # links or conditions are not known here; what else is wrong shows again below
                if self.read_small(name, 1) is not None:
                    return False
                self._fs.pipe_file(path, data)
                return None

    def delete_files(self, names: Iterable[str]) -> None:
        for name in names:
            with _os_errors(self._told(name)), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(name))

    def delete(self, folder: str, first: str) -> None:
        """Delete a folder and all in it, the file `first` before the others."""
        with _os_errors(self._told(folder)):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._path(f"{folder}/{first}"))
            self._fs.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path(folder), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _told(self, name: str) -> str:
        return f"{self.url}/{name}".rstrip("/")


@contextlib.contextmanager
def _beside(path: Path, data: bytes) -> Iterator[Path]:
    """A synced file next to `path`, to be put in its place; gone after the block."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{files.TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield temporary
    finally:
        files.remove(temporary)


class _Upload:
    """A file on its way to a remote place. Dropped, where the backend can, if the block raises."""

    def __init__(self, fs: Any, path: str, points: str) -> None:
        self._points = points
        failpoints.hit(f"{points}.create")
        try:
            self._file = fs.open(path, "wb", block_size=PART_BYTES)
        except FileNotFoundError:  # places with real folders, such as sftp; buckets have none
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._file = fs.open(path, "wb", block_size=PART_BYTES)

    def write(self, data: files.Buffer) -> None:
        whole = memoryview(data)
        if whole.nbytes == 0:
            return
        view = whole.cast("B")
        if failpoints.armed(f"{self._points}.write.mid"):
            self._write(view[: len(view) // 2])
            failpoints.hit(f"{self._points}.write.mid")
            view = view[len(view) // 2 :]
        self._write(view)

    def _write(self, view: memoryview) -> None:
        for start in range(0, len(view), PART_BYTES):
            self._file.write(view[start : start + PART_BYTES])

    def __enter__(self) -> _Upload:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            failpoints.hit(f"{self._points}.sync")
            self._file.close()
            return
        with contextlib.suppress(Exception):  # the upload has failed already, and that is what is raised
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # or it would be completed, cut off, when it is collected


def _open_filesystem(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    scheme = url.partition("://")[0] if "://" in url else "file"
    try:
        # An instance of our own: a shared one would keep the endpoint and the listings of its first user.
        fs, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, **options)
    except ImportError as error:
        package = str(known_implementations.get(scheme, {}).get("class", scheme)).partition(".")[0]
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed: pip install {EXTRAS.get(scheme, package)}"
        ) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{redacted(url)!r} cannot be used ({redacted(str(error))}); give a path or an fsspec URL such as s3://bucket/run"
        ) from None  # the library's own message may hold the password
    return fs, str(root)


@contextlib.contextmanager
def _os_errors(what: str) -> Iterator[None]:
    try:
        yield
    except PayloadError:
        raise
    except OSError as error:
        told = str(error)
        if redacted(told) == told:
            raise
        raise OSError(error.errno or errno.EIO, redacted(error.strerror or told), what) from None
    except Exception as error:
        raise OSError(errno.EIO, redacted(f"{type(error).__name__}: {error}"), what) from None
