"""Changing who has which fragment of a running run, from outside: ask the syncer, and wait until it is done."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from atoll.errors import LaunchError, UnreachableError
from atoll.wire import ClientOptions, change_shards, fetch_status

LOOK_S = 0.2
SILENT_S_MAX = 60.0
"""A coordinator that dies is back within seconds where a launcher keeps it; then its tape says what has become of the
change."""
CHANGE_S_MAX = 3600.0
"""A fragment comes to rest within minutes, and 100 GB through one coordinator take some more."""


def shards_of(options: ClientOptions) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The status of a run, and its shards. Raises LaunchError if it has none."""
    answer = asyncio.run(fetch_status(options))
    shards = answer.get("shards")
    if not isinstance(shards, list):
        raise LaunchError(f"{options.address} leads no shards; begin a run with --shards to have any")
    return answer, [dict(shard) for shard in shards]


def change_shards_of(
    options: ClientOptions,
    action: str,
    shard: str,
    fragments: Sequence[int] = (),
    *,
    say: Callable[[str], None] = lambda text: None,
    wait_s: float = CHANGE_S_MAX,
) -> str:
    """Have it done, and say what came of it. Raises LaunchError if it did not go through, or not in this time."""
    text, number = asyncio.run(change_shards(options, action, shard, fragments))
    say(f"{text} ...")
    until_s = time.monotonic() + wait_s
    heard_s = time.monotonic()
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        try:
            told = asyncio.run(fetch_status(options)).get("shard_change", {})
        except UnreachableError as error:
            if time.monotonic() - heard_s > SILENT_S_MAX:
                raise LaunchError(
                    f"the syncer is gone ({error}); when it is back, look with `atoll shards list`"
                ) from None
            continue
        heard_s = time.monotonic()
        if told.get("number") != number:
            raise LaunchError("the syncer was started again meanwhile; look what it has done with `atoll shards list`")
        if told.get("state") == "done":
            return str(told.get("text"))
        if told.get("state") == "failed":
            raise LaunchError(str(told.get("text")))
    raise LaunchError(f"{text} is not done after {wait_s:g} s; it goes on, look with `atoll shards list`")
