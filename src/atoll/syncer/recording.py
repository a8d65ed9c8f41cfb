"""The recorder: with --record, everything that a merge is made from goes to disk before the merge is committed.

A fragment is *anchored* while the recording holds all that leads to its current version: a state to begin with, then
every merge. The recorder sees to it that a fragment is anchored before it is merged:

    seed       the first parameters, at version 0
    restart    the state that an earlier syncer left. If that syncer had recorded all of it (its record on disk says so)
               the checksums are enough; else, and for what comes from a snapshot, the arrays are written
    heal       the state after a learner has brought lost parameters back
    gap        the state after the disk could not take a merge: what lies between is not in the recording

If a write fails, training is worth more: the recorder says so loudly, lets merges pass unrecorded, and tries again
every few seconds; the next merge of each fragment then begins with a new anchor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from atoll.core import FragmentRecord, Layout, Merge, SyncConfig
from atoll.observe import Writer, events
from atoll.store import Recording, RecordPosition
from atoll.syncer.state import FragmentArrays, InspectedPayload

RECORD_RETRY_S = 5.0
"""Pause after a failed write, as the keeper's: a disk that is full stays so for minutes."""
RECORDED = "recorded"
"""In the record of a commit: the recording of the run with this id leads to exactly this version."""
HERE, ZERO, DERIVED = "here", "zero", "derived"
"""How an array of a state is recorded: its bytes, as zeros, or as what earlier records lead to."""


class Recorder:
    """One per syncer. Everything but the writes runs on the event loop; the caller holds the fragment's lock."""

    def __init__(self, recording: Recording | None, threads: Executor, writer: Writer) -> None:
        self.degraded = ""
        """Why merges are not recorded at the moment."""
        self._recording = recording
        self._threads = threads
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._run = ""
        self._at: dict[int, int] = {}
        """By anchored fragment: the version that the recording leads to, durably."""
        self._known: dict[int, int] = {}
        """By fragment: the version that an earlier epoch's recording leads to."""
        self._lost: set[int] = set()
        """Fragments that the recording has lost and not found again."""
        self._retry_s = 0.0

    @property
    def on(self) -> bool:
        return self._recording is not None

    def status(self) -> str:
        """For people: off, on, or why not."""
        return f"degraded: {self.degraded}" if self.degraded else "on" if self.on else "off"

    def begin(self, run: str, config: SyncConfig, layout: Layout) -> None:
        """The run is known: from here on records can be understood."""
        if self._recording is not None:
            self._recording.describe(described(run, config, layout))
            self._run = run

    def resume(self, fragment_records: Mapping[int, FragmentRecord]) -> None:
        """What an earlier syncer left comes from these records, which say whether the recording leads to them."""
        if self._recording is not None and self._recording.begun:
            led = {
                f: int(fragment_record["version"])
                for f, fragment_record in fragment_records.items()
                if fragment_record.get(RECORDED) == self._run
            }
            self._known = led

    def mark(self, fragment: int, version: int) -> dict[str, Any]:
        """What the record of a commit says about the recording."""
        return {RECORDED: self._run} if self._at.get(fragment) == version else {}

    def close(self) -> None:
        if self._recording is not None:
            self._recording.close()

    # ------------------------------------------------------------ states

    async def anchor(self, fragment: int, arrays: FragmentArrays, why: str, round_number: int) -> None:
        """Record the state as it stands, unless the recording leads to it already."""
        if self._recording is None or self._at.get(fragment) == arrays.version:
            return
        if self.degraded and self._loop.time() < self._retry_s:
            self._lost.add(fragment)
            return
        recording, derived = self._recording, self._known.pop(fragment, None) == arrays.version
        head: dict[str, Any] = {"kind": "state", "fragment": fragment, "version": arrays.version, "round": round_number}
        head |= {"checksum": arrays.checksum, "why": why}

        def write() -> None:
            named = arrays.named()
            kept = {name: _describe(name, array, derived) for name, array in named.items()}
            parts = [array.data for name, array in named.items() if kept[name][1] == HERE]
            recording.append({**head, "arrays": kept}, parts).sync()

        if await self._try(fragment, arrays.version, write):
            self._at[fragment] = arrays.version
            self._found_again(fragment)

    async def restate(self, fragment: int, arrays: FragmentArrays, why: str, round_number: int) -> None:
        """The state did not come from a merge: record it whole."""
        self._at.pop(fragment, None)
        self._known.pop(fragment, None)
        await self.anchor(fragment, arrays, why, round_number)

    # ------------------------------------------------------------ merges

    async def payloads(self, merge: Merge, held: Sequence[InspectedPayload]) -> list[RecordPosition] | None:
        """Make the contributions of a merge durable while it is computed, which hides their sync; None if that failed.
        Measured with 4 int4 contributions of 4.2M parameters: what is left for `decision` takes 2 ms instead of 8."""
        recording = self._recording
        if recording is None or merge.fragment not in self._at:
            return None
        places: list[RecordPosition] = []

        def write() -> None:
            for identity, item in zip(merge.contributions, held, strict=True):
                head: dict[str, Any] = {"kind": "payload", "fragment": merge.fragment, "version": merge.version}
                head |= {"learner": identity.learner, "generation": identity.generation, "seq": identity.seq}
                head |= {"codec": item.codec.name, "checksum": xxhash.xxh3_64_intdigest(item.payload.data)}
                places.append(recording.append(head, [item.payload.data]))
            for place in {place.number: place for place in places}.values():  # the last one of each segment
                place.sync()

        return places if await self._try(merge.fragment, merge.version, write) else None

    async def decision(self, merge: Merge, checksum: int, places: Sequence[RecordPosition] | None) -> None:
        """Make a merge durable in the recording, before its version is committed."""
        recording = self._recording
        if recording is None or places is None:
            self._at.pop(merge.fragment, None)
            return
        ids = [
            [identity.learner, identity.generation, identity.seq, place.number, place.offset]
            for identity, place in zip(merge.contributions, places, strict=True)
        ]
        head: dict[str, Any] = {"kind": "merge", "fragment": merge.fragment, "version": merge.version}
        head |= {"round": merge.round, "checksum": checksum, "contributions": ids, "weights": list(merge.weights)}
        head |= {"codec_down": merge.codec_down} if merge.codec_down else {}

        def write() -> None:
            recording.append(head).sync()

        if await self._try(merge.fragment, merge.version, write):
            self._at[merge.fragment] = merge.version

    # ------------------------------------------------------------ a disk that fails

    async def _try(self, fragment: int, version: int, write: Callable[[], None]) -> bool:
        """Write on a thread of the store's. A failure costs the recording, not the training."""
        try:
            await self._loop.run_in_executor(self._threads, write)
        except OSError as error:
            self._at.pop(fragment, None)
            self._known.pop(fragment, None)
            self._lost.add(fragment)
            self._retry_s = self._loop.time() + RECORD_RETRY_S
            if not self.degraded:
                self._tell(
                    f"version {version} of fragment {fragment} cannot be recorded ({error}); training goes on, and "
                    "`atoll replay` cannot follow from there on until this is mended (make room on the disk)"
                )
            self.degraded = str(error)
            return False
        return True

    def _found_again(self, fragment: int) -> None:
        self._lost.discard(fragment)
        if self.degraded and not self._lost:
            self.degraded = ""
            self._tell("every merge is recorded again; `atoll replay` names the versions that were not")

    def _tell(self, text: str) -> None:
        self._writer.emit(events.Warned("syncer", f"recording: {text}"))
        print(f"atoll syncer: recording: {text}", flush=True)


def described(run: str, config: SyncConfig, layout: Layout) -> dict[str, Any]:
    """What must be known to do merges again."""
    tensors = [[t.name, list(t.shape), t.dtype, t.merge] for t in layout.tensors]
    about = {"run": run, "config": config.to_dict(), "tensors": tensors, "fragments": len(layout.fragments)}
    return {**about, "layout": layout.fingerprint}


def _describe(name: str, array: NDArray[np.float32], derived: bool) -> list[Any]:
    """Checksum of an array, and how it is recorded. Zeros are compared as bits: -0.0 is another state. Parameters are
    always written: a reader then allocates no more than the file has, and many models begin with zeros in places."""
    checksum = xxhash.xxh3_64_intdigest(array.data)
    if derived:
        return [checksum, DERIVED]
    return [checksum, HERE if name == "theta" or array.view(np.uint32).any() else ZERO]
