"""Whether this build can work with a syncer that runs, by what that one says of itself."""

from __future__ import annotations

from typing import Any

from atoll.core import PROTOCOL_OLDEST, PROTOCOL_VERSION


def compare_builds(status: dict[str, Any]) -> tuple[str, bool]:
    """What a syncer's status says of its build, in words, and whether this one can work with it."""
    build = status.get("build")
    if not isinstance(build, dict):
        return "0.4 or older, which does not tell its version; a learner finds out when it joins", True
    oldest, newest = (int(number) for number in build["protocols"])
    common = min(newest, PROTOCOL_VERSION)
    told = f"{build['version']}, protocols {oldest} to {newest}"
    if common < max(oldest, PROTOCOL_OLDEST):
        here = f"this build speaks {PROTOCOL_OLDEST} to {PROTOCOL_VERSION}"
        return f"{told}; {here}: they cannot work together; upgrade the older side by one release first", False
    return f"{told}; both speak protocol {common}", True
