"""Snapshots of a whole run at any fsspec URL.

    URL/snapshot-00000042/fragment-0007.safetensors    one per fragment
    URL/snapshot-00000042/rows.json                    the rows
    URL/snapshot-00000042/manifest.json                written last: sizes, checksums, what it is a snapshot of
    URL/claim-000000000042.json                        which syncer writes here (`claim`)

A snapshot without a manifest does not exist. One that does not match its manifest is named and the next older one is
used. Everything here blocks and belongs on a worker thread. OSError means that the place could not be reached or is
full: the snapshot is lost, the run is not, and the next one may succeed.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.errors import ConfigError, LocalProtocolError, PayloadError, StoreError
from atoll.store import failpoints
from atoll.store.claim import CLAIM_WATCH_S, Claim, Hold, later_claim, newest_claim, take_claim
from atoll.store.documents import json_object, whole
from atoll.store.files import Buffer
from atoll.store.loaded import LoadedFragment, LoadedSnapshot
from atoll.store.manifest import (
    MANIFEST_BYTES_MAX,
    MANIFEST_FILE,
    ROWS_FILE,
    FileEntry,
    Manifest,
    decode_manifest,
)
from atoll.store.remote_folder import RemoteFolder
from atoll.store.tensorfile import decode_file, encode_header

LABELS_PER_EPOCH = 1_000_000
"""Labels of two epochs never meet, so that a syncer that was frozen while another took over cannot write into, or
delete, a snapshot of its successor."""
READ_TRIES = 3
"""Attempts to read a snapshot from a place that fails, before an older one is taken."""
READ_PAUSE_S = 0.5
READERS_MAX = 4
"""Files read at once: one stream from a bucket rarely fills a link."""
_NAME = re.compile(r"snapshot-(\d{8,})")


@dataclass(frozen=True, slots=True)
class SnapshotStats:
    """A finished snapshot. `problems` are deletions that failed; they are tried again after the next one."""

    label: int
    url: str
    bytes: int
    write_ns: int
    deleted: tuple[str, ...]
    problems: tuple[str, ...]


class SnapshotTarget:
    """Where the snapshots of a run go. Making one does not touch the place yet.

    `options` go to fsspec. For s3 the endpoint and the credentials may also come from the environment, as usual:
    AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_*.
    """

    def __init__(self, url: str, *, keep: int = 3, options: Mapping[str, Any] | None = None) -> None:
        if keep < 1:
            raise ConfigError(f"keep is {keep}, and at least one snapshot must be kept; use --keep 1 or more")
        self.keep = keep
        self._place = RemoteFolder(url, options)
        self.url = self._place.url

    def claim(self, *, epoch: int, take_over: bool, say: Callable[[str], None], watch_s: float = CLAIM_WATCH_S) -> Hold:
        """Claim this place for one syncer (`store.claim`), with an epoch above that of every snapshot here."""
        written = max(self._labels(), default=0) // LABELS_PER_EPOCH
        least = max(epoch, written + 1 if written else 0)
        return take_claim(self._place, epoch=least, take_over=take_over, say=say, watch_s=watch_s)

    def claimed(self) -> Claim | None:
        """Who has claimed this place last."""
        return newest_claim(self._place)

    def claim_later(self, epoch: int) -> Hold:
        """The same for a place that cannot be reached now."""
        return later_claim(self._place, epoch)

    def begin(self, label: int) -> SnapshotDraft:
        """Start a snapshot. Labels count up: if this one or a higher one exists, the next free one is used."""
        newest = max(self._labels(), default=-1)
        return SnapshotDraft(self, self._place, label if label > newest else newest + 1)

    def load_newest(self) -> tuple[LoadedSnapshot | None, list[str]]:
        """The newest good snapshot, or None, and what was wrong with newer ones.

        Raises OSError if the place cannot be reached (which is not the same as having no snapshot), and StoreError if
        the newest one has a format that only a newer version can read.
        """
        problems: list[str] = []
        unreachable: OSError | None = None
        for label in sorted(self._labels(), reverse=True):
            name = _name(label)
            try:
                loaded = _read_patiently(self._place, name)
            except PayloadError as error:
                problems.append(f"{self._place.url}/{name}: {error}; the next older snapshot is used")
            except StoreError as error:
                raise StoreError(f"{self._place.url}/{name}: {error}") from error
            except OSError as error:
                unreachable = error
                problems.append(f"{self._place.url}/{name}: cannot be read ({error}); the next older snapshot is used")
            else:
                loaded.label = label
                loaded.problems = list(problems)
                return loaded, problems
        if unreachable is not None:
            raise unreachable
        return None, problems

    def _labels(self) -> list[int]:
        return [int(match[1]) for name in self._place.folders() if (match := _NAME.fullmatch(name))]

    def _retain(self, newest: int, run: str) -> tuple[list[str], list[str]]:
        """Delete what is beyond `keep`, and halves of snapshots older than the one just finished.

        What an older epoch wrote stays until this one has `keep` of its own (its newest `keep`, that is): until then it
        is what the run comes back from, and its syncer may not know yet that it was overtaken. What a newer epoch or
        another run wrote is never touched.
        """
        deleted: list[str] = []
        problems: list[str] = []
        kept = [0, 0]  # of older epochs, of this one
        for label in sorted((label for label in self._labels() if label <= newest), reverse=True):
            name, own = _name(label), label // LABELS_PER_EPOCH == newest // LABELS_PER_EPOCH
            try:
                complete = label == newest or self._place.size(f"{name}/{MANIFEST_FILE}") is not None
                kept[own] += complete
                settled = own or kept[True] >= self.keep
                beyond = kept[own] > self.keep or (not own and settled)
                unwanted = beyond if complete else settled
                if label < newest and unwanted and (own or not complete or self._run_of(name) in ("", run)):
                    failpoints.hit("snapshot.delete")
                    self._place.delete(name, first=MANIFEST_FILE)
                    deleted.append(name)
            except OSError as error:
                problems.append(f"{self._place.url}/{name} could not be deleted ({error})")
        return deleted, problems

    def _run_of(self, name: str) -> str:
        """Which run this is a snapshot of; empty if it does not say so, or is damaged."""
        with contextlib.suppress(PayloadError, StoreError):
            data = self._place.read_small(f"{name}/{MANIFEST_FILE}", MANIFEST_BYTES_MAX)
            return str(decode_manifest(data or b"").about.get("run", ""))
        return ""


class SnapshotDraft:
    """A snapshot in the making. `put_fragment` may be called from several threads."""

    def __init__(self, target: SnapshotTarget, place: RemoteFolder, label: int) -> None:
        self.label = label
        self.name = _name(label)
        self.url = f"{place.url}/{self.name}"
        self._target = target
        self._place = place
        self._files: dict[str, FileEntry] = {}
        self._versions: dict[str, int] = {}
        self._write_ns = 0
        self._lock = threading.Lock()

    def put_fragment(
        self, index: int, version: int, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any]
    ) -> None:
        """Write one fragment. The arrays must not change meanwhile."""
        begun = time.monotonic_ns()
        name = f"fragment-{index:04}.safetensors"
        if any(array.ndim != 1 or not array.flags.c_contiguous for array in arrays.values()):
            raise LocalProtocolError(f"fragment {index}: a snapshot takes flat contiguous arrays")
        about = json.dumps({"fragment": index, "version": version, "meta": meta}, separators=(",", ":"))
        tensors = [(key, array.dtype.name, array.shape) for key, array in arrays.items()]
        parts: list[Buffer] = [encode_header(tensors, {"atoll": about})]
        parts += [array.view(np.uint8).data for array in arrays.values()]
        size, digest = self._place.write(f"{self.name}/{name}", parts, "snapshot.fragment")
        with self._lock:
            self._files[name] = FileEntry(size, digest)
            self._versions[str(index)] = version
            self._write_ns += time.monotonic_ns() - begun

    def finish(self, rows: Mapping[str, Any], about: Mapping[str, Any]) -> SnapshotStats:
        """Write the rows, then the manifest: from here on the snapshot exists. Then delete what is too old."""
        begun = time.monotonic_ns()
        document = json.dumps(rows, separators=(",", ":")).encode()
        size, digest = self._place.write(f"{self.name}/{ROWS_FILE}", [document], "snapshot.rows")
        self._files[ROWS_FILE] = FileEntry(size, digest)
        told = {"versions": self._versions, "created": datetime.now(UTC).isoformat(timespec="seconds"), **about}
        manifest = Manifest(dict(sorted(self._files.items())), told).encode()
        self._place.write(f"{self.name}/{MANIFEST_FILE}", [manifest], "snapshot.manifest")
        self._write_ns += time.monotonic_ns() - begun
        total = len(manifest) + sum(entry.size for entry in self._files.values())
        try:
            deleted, problems = self._target._retain(self.label, str(about.get("run", "")))
        except OSError as error:
            deleted, problems = [], [f"{self._place.url} could not be listed ({error})"]
        return SnapshotStats(self.label, self.url, total, self._write_ns, tuple(deleted), tuple(problems))

    def abandon(self) -> None:
        """Delete what was written so far, if the place lets us; what stays is deleted after a later snapshot."""
        with contextlib.suppress(OSError):
            self._place.delete(self.name, first=MANIFEST_FILE)


def load_snapshot(url: str, options: Mapping[str, Any] | None = None) -> LoadedSnapshot:
    """Read one snapshot, or the newest good one of a folder of snapshots."""
    place = RemoteFolder(url, options)
    if _NAME.fullmatch(place.url.rpartition("/")[2]) or place.size(MANIFEST_FILE) is not None:
        try:
            return _read_patiently(place, "")
        except (PayloadError, StoreError) as error:
            raise StoreError(f"{place.url}: {error}") from error
    loaded, problems = SnapshotTarget(url, options=options).load_newest()
    if loaded is None:
        told = "; ".join(problems) or "there is none"
        raise StoreError(
            f"no usable snapshot in {place.url} ({told}); give the URL of a snapshot or of a folder of them"
        )
    return loaded


def _read_patiently(place: RemoteFolder, name: str) -> LoadedSnapshot:
    """Read with some retries: a passing fault of a network must not cost the newest snapshot."""
    for _ in range(READ_TRIES - 1):
        with contextlib.suppress(OSError):
            return _read(place, name)
        time.sleep(READ_PAUSE_S)
    return _read(place, name)


def _read(place: RemoteFolder, name: str) -> LoadedSnapshot:
    prefix = f"{name}/" if name else ""
    size = place.size(prefix + MANIFEST_FILE)
    if size is None:
        raise PayloadError(f"it has no {MANIFEST_FILE}, so it was never finished")
    if size > MANIFEST_BYTES_MAX:
        raise PayloadError(f"its {MANIFEST_FILE} has {size} bytes")
    manifest = decode_manifest(place.read(prefix + MANIFEST_FILE, size).tobytes())
    sizes = place.sizes(name)
    for file, entry in manifest.files.items():  # all sizes before anything is allocated
        found = sizes.get(file)
        if found != entry.size:
            raise PayloadError(f"{file} is missing" if found is None else f"{file} has {found} bytes, not {entry.size}")
    loaded = LoadedSnapshot(about=manifest.about, url=f"{place.url}/{name}".rstrip("/"))
    if (match := _NAME.fullmatch(loaded.url.rpartition("/")[2])) is not None:
        loaded.label = int(match[1])
    loaded.rows = json_object(_checked(place, prefix, ROWS_FILE, manifest.files[ROWS_FILE]).tobytes(), ROWS_FILE)
    fragments = [file for file in manifest.files if file != ROWS_FILE]
    with ThreadPoolExecutor(READERS_MAX) as pool:
        for index, fragment in pool.map(
            lambda file: _read_fragment(_checked(place, prefix, file, manifest.files[file])), fragments
        ):
            loaded.fragments[index] = fragment
    return loaded


def _checked(place: RemoteFolder, prefix: str, file: str, entry: FileEntry) -> NDArray[np.uint8]:
    data = place.read(prefix + file, entry.size)
    if xxhash.xxh3_64_hexdigest(data.data) != entry.xxh3:
        raise PayloadError(f"{file} does not match its checksum")
    return data


def _read_fragment(data: NDArray[np.uint8]) -> tuple[int, LoadedFragment]:
    arrays, metadata = decode_file(data)
    about = json_object(metadata.get("atoll", "").encode("utf-8", "replace"), "the description of a fragment")
    index, version, meta = (about.get(name) for name in ("fragment", "version", "meta"))
    if not whole((index, version)) or not isinstance(meta, dict):
        raise PayloadError("a fragment's file does not say which fragment and version it holds")
    return int(about["fragment"]), LoadedFragment(int(about["version"]), meta, arrays)


def _name(label: int) -> str:
    return f"snapshot-{label:08}"
