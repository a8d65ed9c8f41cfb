"""The relay's links to the shards of its run: each asks through its own for what goes into its merges. They last as
long as the link to the syncer does, because what is held goes by that one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from atoll.errors import AtollError, ConfigError
from atoll.syncer import relay_calls as calls
from atoll.wire import ClientOptions, ShardConnection

LINK_PAUSE_S = 0.2
LINK_PAUSE_S_MAX = 30.0
"""Between two attempts to have a link, growing while there is none (an older syncer, a dead shard): contributions are
passed on meanwhile, so nobody waits for it."""
Connect = Callable[[ClientOptions, Any], ShardConnection]


class ShardWays:
    def __init__(self, connect: Connect, place: ClientOptions, name: str, answer: Any) -> None:
        self._connect, self._place, self._name, self._answer = connect, place, name, answer
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._up: set[str] = set()
        self._of: tuple[str, ...] = ()
        """By fragment: the address of its shard. Empty: the syncer merges."""

    def route(self, shards: Sequence[str], shard_of: Sequence[int]) -> None:
        """The syncer has said who serves what."""
        self._of = tuple(shards[index] for index in shard_of)
        for address in self._tasks.keys() - set(shards):
            self._tasks.pop(address).cancel()
        for address in shards:
            if address not in self._tasks:
                self._tasks[address] = asyncio.create_task(self._keep(address))

    def reaches(self, fragment: int) -> bool:
        """Whether whoever merges this fragment can ask here for what goes into it."""
        return not self._of or (0 <= fragment < len(self._of) and self._of[fragment] in self._up)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _keep(self, address: str) -> None:
        pause_s = LINK_PAUSE_S
        while True:
            try:
                async with self._connect(replace(self._place, address=address), self._answer) as connection:
                    await connection.peer.call(calls.RELAY, {"version": calls.RELAY_LINK_VERSION, "name": self._name})
                    self._up.add(address)
                    pause_s = LINK_PAUSE_S
                    assert connection.running is not None
                    await asyncio.shield(connection.running)
            except ConfigError:  # an address that must not have the token: RoutedBulk says so, too
                return
            except AtollError:
                pass
            finally:
                self._up.discard(address)
            await asyncio.sleep(pause_s)
            pause_s = min(LINK_PAUSE_S_MAX, 2.0 * pause_s)
