"""A learner's link to the syncer: latency, bandwidth, loss, and everything that goes wrong with it.

What travels here is what TCP makes of a network. Within one stream nothing is lost or reordered: a lost packet comes
later (and everything behind it), and a link that is down keeps bytes until it is up again or somebody gives the
connection up. Streams overtake each other, calls are repeated after their answer was lost, and bytes of a call that was
given up still arrive: so at the level of messages there is loss, duplication and reordering all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from atoll.instruments.sim.clock import Clock

UP, DOWN = 0, 1
RETRANSMIT_NS = 200_000_000
"""The least time that Linux waits before it sends a lost packet again; each further loss doubles it."""
LOSSES_MAX = 6
"""Losses of one message in a row: beyond this the connection would be given up anyway."""
PACKET_BYTES = 1400
SMALL_BYTES = 2_000
"""Messages up to this size do not wait for the bytes of a bulk call where a link shares its rate (`shares`)."""


@dataclass(frozen=True, slots=True)
class LinkWeather:
    """How a link is, in each direction (up, down)."""

    latency_ns: tuple[int, int] = (1_000_000, 1_000_000)
    jitter_ns: int = 0
    bits_per_s: tuple[float, float] = (0.0, 0.0)
    """0: without limit."""
    loss: float = 0.0
    """Chance that a packet has to be sent again."""
    blocked: tuple[bool, bool] = (False, False)
    corrupt: tuple[float, float] = (0.0, 0.0)
    """Chance that a message arrives damaged."""
    breaks: float = 0.0
    """Chance that a call is broken off, before or after it did its work."""


class Stream:
    """Order: nothing arrives before what was sent earlier on the same stream."""

    __slots__ = ("arrived_ns",)

    def __init__(self) -> None:
        self.arrived_ns = [0, 0]


class VirtualLink:
    def __init__(self, clock: Clock, dice: Random, weather: LinkWeather) -> None:
        self._clock = clock
        self._dice = dice
        self.weather = weather
        self.blocked_since = [-1, -1]
        self._free_ns = [0, 0]
        self._kept: list[list[tuple[int, Stream, Callable[..., None], tuple[Any, ...]]]] = [[], []]
        self.shares = False
        """Connections share the rate, as TCP does: a small message comes through while a large one is under way. The
        simulator's seeds were drawn without it; the lab's links have it."""
        self.messages = 0
        self.bytes = [0, 0]
        """What was carried, up and down."""

    def set(self, weather: LinkWeather) -> None:
        """Change the weather; what was kept back flows on."""
        before, self.weather = self.weather, weather
        for direction in (UP, DOWN):
            if weather.blocked[direction] and not before.blocked[direction]:
                self.blocked_since[direction] = self._clock.now_ns
            elif before.blocked[direction] and not weather.blocked[direction]:
                self.blocked_since[direction] = -1
                kept, self._kept[direction] = self._kept[direction], []
                for size, stream, deliver, arguments in kept:
                    self.carry(direction, size, stream, deliver, *arguments)

    @property
    def blocked(self) -> bool:
        return self.weather.blocked[UP] or self.weather.blocked[DOWN]

    def carry(self, direction: int, size: int, stream: Stream, deliver: Callable[..., None], *arguments: Any) -> None:
        """Call `deliver(*arguments)` when these bytes are at the other end."""
        weather = self.weather
        if weather.blocked[direction]:
            self._kept[direction].append((size, stream, deliver, arguments))
            return
        self.messages += 1
        self.bytes[direction] += size
        now_ns = self._clock.now_ns
        rate = weather.bits_per_s[direction]
        sent_ns = now_ns
        if rate:
            free_ns = self._free_ns[direction]
            takes_ns = int(size * 8e9 / rate)
            free_ns = (free_ns if free_ns > now_ns else now_ns) + takes_ns
            self._free_ns[direction] = free_ns
            sent_ns = min(free_ns, now_ns + 2 * takes_ns) if self.shares and size <= SMALL_BYTES else free_ns
        arrival_ns = sent_ns + weather.latency_ns[direction]
        if weather.jitter_ns:
            arrival_ns += int(self._dice.random() * weather.jitter_ns)
        if weather.loss:
            arrival_ns += self._lost_ns(size, weather.loss)
        arrived = stream.arrived_ns
        if arrival_ns < arrived[direction]:
            arrival_ns = arrived[direction]
        arrived[direction] = arrival_ns
        self._clock.at(arrival_ns, deliver, *arguments)

    def _lost_ns(self, size: int, loss: float) -> int:
        """How much later a message comes because packets of it were lost."""
        chance = 1.0 - (1.0 - loss) ** (1 + size // PACKET_BYTES)
        late_ns, wait_ns = 0, RETRANSMIT_NS
        for _ in range(LOSSES_MAX):
            if self._dice.random() >= chance:
                break
            late_ns += wait_ns
            wait_ns *= 2
            chance = loss
        return late_ns

    def damaged(self, direction: int) -> bool:
        """Whether a message that passes now is damaged."""
        chance = self.weather.corrupt[direction]
        return chance > 0.0 and self._dice.random() < chance

    def breaks(self) -> bool:
        chance = self.weather.breaks
        return chance > 0.0 and self._dice.random() < chance


def combined(fair: LinkWeather, faults: list[tuple[str, str, float]]) -> LinkWeather:
    """The weather while these (kind, direction, amount) faults last at once: delays add up, limits take the least, and
    any block blocks."""
    weather = fair
    for kind, direction, amount in faults:
        hit = (direction in ("both", "up"), direction in ("both", "down"))
        if kind in ("partition", "stall"):
            up, down = weather.blocked
            weather = replace(weather, blocked=(up or hit[UP], down or hit[DOWN]))
        elif kind == "delay":
            extra_ns = int(amount * 1e6)
            up_ns, down_ns = weather.latency_ns
            weather = replace(weather, latency_ns=(up_ns + extra_ns * hit[UP], down_ns + extra_ns * hit[DOWN]))
        elif kind == "limit":
            rates = [_least(r, amount * 1e3) if h else r for r, h in zip(weather.bits_per_s, hit, strict=True)]
            weather = replace(weather, bits_per_s=(rates[UP], rates[DOWN]))
        elif kind == "corrupt":
            share = min(0.5, amount / 100)
            weather = replace(weather, corrupt=(share * hit[UP], share * hit[DOWN]))
        elif kind == "lose":
            weather = replace(weather, loss=max(weather.loss, amount))
        elif kind == "break":
            weather = replace(weather, breaks=max(weather.breaks, amount))
    return weather


def _least(rate: float, limit: float) -> float:
    return limit if rate == 0.0 else min(rate, limit)
