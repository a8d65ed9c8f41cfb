"""JSON that was read from a disk or a bucket: an object, or one kind of error.

A checksum only says that the bytes are those that somebody wrote. What is in them may come from a newer version, from
another program, or from a memory that failed before the checksum was made. So their form is checked as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from atoll.errors import PayloadError

NUMBER_MAX = 2**63 - 1
"""Offsets, sizes and counters: what the file system's own calls take."""
CHECKSUM_MAX = 2**64 - 1


def json_object(data: bytes, what: str) -> dict[str, Any]:
    """Raises PayloadError unless `data` is one JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"{what} is not JSON ({type(error).__name__})") from error
    if not isinstance(found, dict):
        raise PayloadError(f"{what} is not a JSON object")
    return found


def whole(values: Iterable[Any], highest: int = NUMBER_MAX) -> bool:
    """True if all are integers from 0 to `highest`; JSON may bring anything."""
    return all(type(value) is int and 0 <= value <= highest for value in values)
