"""A shard that comes to a run by itself (`atoll shard --join SYNCER`), and hands its fragments over before it goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from atoll.core import Refusal
from atoll.errors import AtollError, LaunchError, RefusedError, UnreachableError
from atoll.wire import ClientOptions, change_shards, fetch_status

RETRY_S = 0.5
TELL_EVERY_S = 10.0
HAND_OVER_S_MAX = 120.0
"""How long a shard that is told to end hands its fragments over. A launcher waits a little longer."""


@dataclass(frozen=True, slots=True)
class RunToJoin:
    """The syncer, and where it and the learners find this shard."""

    syncer: ClientOptions
    address: str
    say: Callable[[str], None]

    async def come(self) -> None:
        """Until this is one of the run's shards. Raises LaunchError if the syncer will not have it."""
        told_s = -TELL_EVERY_S
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.say(await self._change("add"))
                return
            except RefusedError as error:
                if error.code != Refusal.BUSY:
                    raise LaunchError(f"the syncer does not take this shard: {error.detail}") from error
                why = error.detail
            except UnreachableError as error:
                why = str(error)
            if loop.time() - told_s >= TELL_EVERY_S:
                told_s = loop.time()
                self.say(f"waits for the syncer at {self.syncer.address} ({why})")
            await asyncio.sleep(RETRY_S)

    async def go(self) -> None:
        """Have the others take its fragments, if that can be done in time. They are on its disk all the same."""
        try:
            async with asyncio.timeout(HAND_OVER_S_MAX):
                while True:
                    try:
                        self.say(await self._change("remove"))
                        return
                    except RefusedError as error:
                        if error.code != Refusal.BUSY:
                            raise
                    await asyncio.sleep(RETRY_S)
        except TimeoutError:
            self.say(f"its fragments could not be handed over within {HAND_OVER_S_MAX:g} s; they stay on its disk")
        except AtollError as error:
            why = error.detail if isinstance(error, RefusedError) else str(error)
            self.say(f"its fragments were not handed over ({why}); they stay on its disk")

    async def _change(self, action: str) -> str:
        """Have it done, and wait until it is."""
        text, number = await change_shards(self.syncer, action, self.address)
        while True:
            await asyncio.sleep(RETRY_S / 5)
            told = (await fetch_status(self.syncer)).get("shard_change", {})
            if told.get("number") != number:
                return text  # another syncer, or another change: this one is over
            if told.get("state") == "failed":
                raise LaunchError(str(told.get("text")))
            if told.get("state") == "done":
                return str(told.get("text"))
