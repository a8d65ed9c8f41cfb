"""The manifest of a snapshot: which files belong to it, and how to check them. It is written last."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from atoll.errors import PayloadError, StoreError

SNAPSHOT_FORMAT = 2
MANIFEST_FILE = "manifest.json"
ROWS_FILE = "rows.json"
MANIFEST_BYTES_MAX = 64 << 20
"""Some hundred bytes per fragment, and the run's configuration."""
_FILE_NAME = re.compile(r"rows\.json|fragment-\d{4,}\.safetensors")


@dataclass(frozen=True, slots=True)
class FileEntry:
    size: int
    xxh3: str


@dataclass(frozen=True, slots=True)
class Manifest:
    files: dict[str, FileEntry]
    about: dict[str, Any]

    def encode(self) -> bytes:
        body = {"files": {name: asdict(entry) for name, entry in self.files.items()}, "about": self.about}
        return json.dumps({"format": SNAPSHOT_FORMAT, "xxh3": _digest(body), **body}, indent=1).encode()


def decode_manifest(data: bytes) -> Manifest:
    """Raises PayloadError on a damaged manifest and StoreError on a format that this version does not read."""
    try:
        document: dict[str, Any] = json.loads(data)
        found = int(document["format"])
        if found > SNAPSHOT_FORMAT:
            raise StoreError(
                f"its format is {found} and this version reads up to {SNAPSHOT_FORMAT}; install a newer atoll"
            )
        for number in range(found, SNAPSHOT_FORMAT):
            if number not in UPGRADES:
                raise StoreError(
                    f"its format {found} is too old to be read; load it with an older atoll and save it anew"
                )
            document = UPGRADES[number](document)
        body = {"files": document["files"], "about": document["about"]}
        if document["xxh3"] != _digest(body):
            raise PayloadError(f"{MANIFEST_FILE} does not match its checksum")
        entries = {str(name): FileEntry(int(e["size"]), str(e["xxh3"])) for name, e in body["files"].items()}
        about = dict(body["about"])
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise PayloadError(f"{MANIFEST_FILE} is torn or damaged ({type(error).__name__})") from error
    if ROWS_FILE not in entries or any(_FILE_NAME.fullmatch(n) is None or e.size < 0 for n, e in entries.items()):
        raise PayloadError(f"{MANIFEST_FILE} lists files that are not a snapshot's")
    return Manifest(entries, about)


def _digest(body: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _from_1(document: dict[str, Any]) -> dict[str, Any]:
    """Format 1 listed files as [name, size, xxh3] and had no checksum of its own. It was never in a release; it is
    here so that the way from one format to the next is used before it is needed."""
    files = {name: {"size": size, "xxh3": xxh3} for name, size, xxh3 in document["files"]}
    body = {"files": files, "about": document["about"]}
    return {"format": 2, "xxh3": _digest(body), **body}


UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""How to read an older format: from each number to the next."""
