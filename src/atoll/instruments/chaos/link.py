"""One learner's link inside the proxy: its weather as it changes, when bytes may pass, and which bits flip.

All connections of a learner share it, so that a limit is the link's and not each connection's. It lives on the proxy's
event loop and is never touched from another thread.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

from atoll.instruments.chaos.weather import Way, Weather

UP, DOWN = "up", "down"
FLIP_UNIT_BYTES = 1_000_000
LIMIT_LATE_S = 0.02
"""A link may make up for that much lateness of the event loop, else every late wake-up would lower its rate."""


class Flipper:
    """Flips bits of one direction, at places that follow from its seed."""

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self._per_byte = 0.0
        self._gap = -1
        self.count = 0

    def set(self, flips_per_mb: float) -> None:
        """Flip at this rate from now on; from the first byte when it did not flip before."""
        if flips_per_mb and not self._per_byte:
            self._gap = -1
        self._per_byte = flips_per_mb / FLIP_UNIT_BYTES

    def apply(self, data: memoryview) -> memoryview:
        """The bytes as the other side gets them."""
        if not self._per_byte or not len(data):
            return data
        if self._gap < 0:
            # A corrupting link that happens to corrupt nothing would be no fault at all: the first bytes get one.
            self._gap = int(self._dice.random() * min(len(data), 1 / self._per_byte))
        if self._gap >= len(data):
            self._gap -= len(data)
            return data
        changed = bytearray(data)
        while self._gap < len(changed):
            changed[self._gap] ^= 1 << int(self._dice.random() * 8)
            self.count += 1
            self._gap += 1 + int(-math.log(1.0 - self._dice.random()) / self._per_byte)
        self._gap -= len(changed)
        return memoryview(changed)


class Link:
    """The weather between one learner and the syncer, and everything that waits for it."""

    def __init__(self, seed: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._ways = {UP: Way(), DOWN: Way()}
        self._free_at = {UP: 0.0, DOWN: 0.0}
        self.flippers = {UP: Flipper(f"{seed}/{UP}"), DOWN: Flipper(f"{seed}/{DOWN}")}
        self.bytes = {UP: 0, DOWN: 0}

    def set(self, weather: Weather) -> None:
        """New weather, for what is under way too."""
        for direction, way in ((UP, weather.up), (DOWN, weather.down)):
            if way.bits_per_s != self._ways[direction].bits_per_s:
                self._free_at[direction] = self._loop.time()
            self.flippers[direction].set(way.flips_per_mb)
            self._ways[direction] = replace(way)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def way(self, direction: str) -> Way:
        return self._ways[direction]

    async def connectable(self) -> None:
        """Wait while a partition keeps new connections from being made: either direction is enough for that."""
        while self._ways[UP].blocked or self._ways[DOWN].blocked:
            await self._change(None)

    async def readable(self, direction: str) -> None:
        """Wait while a partition keeps bytes from leaving their sender."""
        while self._ways[direction].blocked:
            await self._change(None)

    async def passable(self, direction: str, read_at: float, size: int) -> None:
        """Wait until `size` bytes that left their sender at `read_at` may arrive."""
        booked: Way | None = None
        due = 0.0
        while True:
            way, now, wait = self._ways[direction], self._loop.time(), None
            if way.blocked or way.stalled:
                booked = None
            elif (late := read_at + way.delay_s - now) > 0.0:
                wait, booked = late, None
            elif way.bits_per_s:
                if booked is not way:
                    due, booked = self._book(direction, size, now), way
                wait = due - now
                if wait <= 0.0:
                    return
            else:
                return
            await self._change(wait)

    def _book(self, direction: str, size: int, now: float) -> float:
        """Take the link's time for these bytes, after what was booked before; returns when they are through."""
        start = max(self._free_at[direction], now - LIMIT_LATE_S)
        self._free_at[direction] = start + size * 8.0 / self._ways[direction].bits_per_s
        return self._free_at[direction]

    async def _change(self, timeout_s: float | None) -> None:
        """Wait for other weather, or that long."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            pass
