"""A shard's part in moving a fragment: telling what there is of it, giving it piece by piece, taking it in, letting go.

The coordinator leads both sides, and sees to it that nobody changes the fragment meanwhile. What moves is everything
that a version is made of, the last updates, and contributions that wait. Whoever takes it compares every checksum and
has it on disk before it says so. Until the coordinator says `drop`, the shard that gives it has it still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import NO_VERSION, ContributionId, Refusal, VersionToStore
from atoll.errors import AtollError, RefusedError
from atoll.store import failpoints
from atoll.syncer import shard_calls as calls
from atoll.syncer.fragment_work import store_version
from atoll.syncer.state import Update

if TYPE_CHECKING:
    from atoll.syncer.shard_arrays import ShardArrays

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Arriving:
    """A fragment on its way to this shard."""

    about: Mapping[str, Any]
    """What `describe` said of it."""
    bytes: dict[str, U8]


class FragmentMoves:
    def __init__(self, arrays: ShardArrays) -> None:
        self._arrays = arrays
        self._leaving: dict[int, dict[str, U8]] = {}
        self._arriving: dict[int, Arriving] = {}

    # ------------------------------------------------------------ where it comes from

    async def describe(self, fragment: int, ids: list[ContributionId]) -> dict[str, Any]:
        """What there is to move. `ids` are the contributions that count."""
        state = self._arrays.state
        if state is None or fragment not in state.owned or not state.fragments:
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"fragment {fragment} is not on this shard")
        missing = [one for one in ids if one not in self._arrays.held]
        if missing:
            raise RefusedError(Refusal.UNKNOWN_VERSION, f"{missing[0]} is not on this shard")
        here, held = state.fragments[fragment], [self._arrays.held[one] for one in ids]
        parts = {f"array {name}": array.view(np.uint8) for name, array in here.named().items()}
        parts |= {f"update {version}": update.payload for version, update in here.ring.items()}
        parts |= {f"contribution {index}": item.payload for index, item in enumerate(held)}
        self._leaving[fragment] = parts
        digests = await self._arrays.on_a_worker(_digests, parts)
        handed = await self._arrays.keeper.handed_abouts(fragment)
        return {
            "version": here.version,
            "checksum": here.checksum,
            "parts": [[what, int(data.nbytes), digests[what]] for what, data in parts.items()],
            "updates": [[version, update.checksum, update.codec] for version, update in here.ring.items()],
            "contributions": [
                [calls.id_values(one), item.codec.name, handed.get(one)] for one, item in zip(ids, held, strict=True)
            ],
        }

    def read(self, fragment: int, what: str, start: int, stop: int) -> memoryview:
        parts = self._leaving.get(fragment, {})
        if what not in parts:
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"{what} of fragment {fragment} is not about to move")
        failpoints.hit("move.read")
        return parts[what][start:stop].data

    # ------------------------------------------------------------ where it goes

    def receive(self, fragment: int, about: Mapping[str, Any]) -> None:
        """Room for a fragment that is on its way."""
        state = self._arrays.state
        if state is None or not state.fragments or fragment in state.owned:
            raise RefusedError(Refusal.NOT_READY, f"this shard has fragment {fragment} already, or no model yet")
        whole = 4 * state.layout.fragments[fragment].size
        for what, size, _ in about["parts"]:
            if (size != whole) if what.startswith("array ") else not 0 <= size <= 2 * whole + 4096:
                raise RefusedError(Refusal.SIZE, f"{what} of fragment {fragment} has {size} bytes, not {whole}")
        self._arriving[fragment] = Arriving(
            about, {what: np.empty(int(size), np.uint8) for what, size, _ in about["parts"]}
        )

    def put(self, fragment: int, what: str, start: int, data: U8) -> None:
        arriving = self._arriving.get(fragment)
        if arriving is None or what not in arriving.bytes or start + data.nbytes > arriving.bytes[what].nbytes:
            raise RefusedError(Refusal.SIZE, f"{what} of fragment {fragment} does not go here")
        arriving.bytes[what][start : start + data.nbytes] = data

    async def install(self, fragment: int, item: VersionToStore) -> None:
        """All of it has come: compare, put it on disk, and have it."""
        arriving, arrays = self._arriving.pop(fragment, None), self._arrays
        if arriving is None or arrays.state is None:
            raise RefusedError(Refusal.UNKNOWN_FRAGMENT, f"nothing of fragment {fragment} has come here")
        about, bytes_of = arriving.about, arriving.bytes
        digests = await arrays.on_a_worker(_digests, bytes_of)
        wrong = [what for what, _, digest in about["parts"] if digests[what] != digest]
        if wrong or digests["array theta"] != item.checksum:
            what = wrong[0] if wrong else "what its checksum says"
            raise RefusedError(
                Refusal.CHECKSUM, f"fragment {fragment} did not arrive as it was ({what}); move it again"
            )
        named = {
            what.removeprefix("array "): data.view(np.float32)
            for what, data in bytes_of.items()
            if what.startswith("array ")
        }
        ring = {
            int(version): Update(bytes_of[f"update {version}"], int(checksum), str(codec))
            for version, checksum, codec in about["updates"]
        }
        arrays.state.take_in(fragment, item.version, item.checksum, named, ring)
        try:
            await self._take_contributions(fragment, about["contributions"], bytes_of)
            await self._to_disk(item)
        except BaseException:
            self._let_go(fragment)
            raise
        arrays.copies.pop(fragment, None)

    async def _take_contributions(self, fragment: int, items: list[Any], bytes_of: Mapping[str, U8]) -> None:
        arrays = self._arrays
        assert arrays.state is not None
        for index, (id_values, codec, handed) in enumerate(items):
            identity, payload = calls.id_of(id_values), bytes_of[f"contribution {index}"]
            try:
                _, arrays.held[identity] = await arrays.on_a_worker(arrays.state.inspect, fragment, payload, codec)
                if handed is not None:
                    await arrays.keeper.take_handed(identity, handed, payload)
            except (AtollError, OSError) as error:
                raise RefusedError(Refusal.NOT_READY, f"{identity} cannot be kept here: {error}") from error

    async def _to_disk(self, item: VersionToStore) -> None:
        arrays = self._arrays
        if arrays.keeper.level == "none":
            return
        try:
            await arrays.remember()
            error = (await store_version(arrays, item)).error
        except OSError as full:
            error = str(full)
        if error:
            raise RefusedError(Refusal.NOT_READY, f"fragment {item.fragment} cannot be written there ({error})")

    def adopt(self, fragments: list[int]) -> None:
        """The shard that had these is lost: learners will bring them here."""
        state = self._arrays.state
        if state is None or not state.fragments:
            raise RefusedError(Refusal.NOT_READY, "this shard has no model yet; ask again soon")
        for fragment in fragments:
            state.take_in(fragment, NO_VERSION, 0, {}, {})

    # ------------------------------------------------------------ letting go

    async def drop(self, fragment: int) -> None:
        """Another shard has it: nothing of it stays here."""
        self._let_go(fragment)
        try:
            await self._arrays.keeper.forget_fragment(fragment)
        except OSError as error:
            raise RefusedError(Refusal.NOT_READY, f"fragment {fragment} cannot be deleted there ({error})") from error

    def _let_go(self, fragment: int) -> None:
        arrays = self._arrays
        self._leaving.pop(fragment, None)
        self._arriving.pop(fragment, None)
        arrays.copies.pop(fragment, None)
        arrays.held = {one: item for one, item in arrays.held.items() if one.fragment != fragment}
        arrays.heals = {key: item for key, item in arrays.heals.items() if key[0] != fragment}
        if arrays.state is not None:
            arrays.state.give_away(fragment)

    def forget(self) -> None:
        """A coordinator has come: what another had begun is over."""
        self._leaving, self._arriving = {}, {}


def _digests(parts: Mapping[str, U8]) -> dict[str, int]:
    return {what: xxhash.xxh3_64_intdigest(data.data) for what, data in parts.items()}
