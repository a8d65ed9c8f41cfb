"""The payloads of recorded merges, each checked before it is believed: where it lies, what it is, every byte of it."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from atoll.errors import ConfigError, PayloadError, StoreError
from atoll.instruments.replay.history import History, RecordedMerge
from atoll.instruments.replay.recording_reader import SegmentReader
from atoll.store import RECORDING_FOLDER, SegmentFile, segment_path
from atoll.syncer import InspectedPayload, ModelState

OPEN_MAX = 4
"""Segments kept open: the payloads of a merge lie in the segment of its decision or in the one before."""
REMEDY = "Put a good copy of that segment back"


class Payloads:
    """Reads contributions back."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: OrderedDict[tuple[int, int], SegmentReader] = OrderedDict()

    def of(self, recorded: RecordedMerge, state: ModelState) -> list[InspectedPayload]:
        """Everything that one merge takes, in its order. StoreError names what is missing or damaged."""
        return [self._one(recorded, number, state) for number in range(len(recorded.places))]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _one(self, recorded: RecordedMerge, number: int, state: ModelState) -> InspectedPayload:
        decision = recorded.decision
        learner, generation, seq = decision.contributions[number]
        segment, offset = recorded.places[number]
        path = segment_path(self._history.state / RECORDING_FOLDER, decision.epoch, segment)
        who = (
            f"contribution {seq} of learner {learner!r} (generation {generation}) to version {decision.version} of "
            f"fragment {decision.fragment}, at byte {offset} of {path.name},"
        )
        reader = self._reader(SegmentFile(decision.epoch, segment, path))
        record = reader.record_at(offset) if reader is not None else None
        if reader is None or record is None or record.kind != "payload":
            raise StoreError(f"{who} is not there: that file is missing or damaged. {REMEDY}")
        head = record.head
        named = [head.get(name) for name in ("fragment", "version", "learner", "generation", "seq")]
        if named != [decision.fragment, decision.version, learner, generation, seq]:
            raise StoreError(f"{who} is not there: that place holds another one. {REMEDY}")
        codec, checksum = str(head.get("codec")), head.get("checksum")
        try:
            size_max = state.contribution_size_max(decision.fragment, codec)
        except ConfigError as error:
            raise StoreError(f"{who} is encoded as {codec!r}, which is no codec here ({error}). {REMEDY}") from error
        if record.body_bytes > size_max or not isinstance(checksum, int):
            raise StoreError(f"{who} has {record.body_bytes} bytes, and {size_max} are the most. {REMEDY}")
        payload = np.empty(record.body_bytes, np.uint8)
        try:
            reader.read_body(record, 0, payload, checksum)
            finite, held = state.inspect(decision.fragment, payload, codec)
        except (PayloadError, OSError) as error:
            raise StoreError(f"{who} is damaged: {error}. {REMEDY}") from error
        if not finite:
            raise StoreError(f"{who} holds values that are not finite, which is never merged. {REMEDY}")
        return held

    def _reader(self, segment: SegmentFile) -> SegmentReader | None:
        key = (segment.epoch, segment.number)
        if key not in self._open:
            try:
                reader = SegmentReader(segment)
            except OSError:
                return None
            if reader.about.get("run") != self._history.run:
                reader.close()
                return None
            self._open[key] = reader
            if len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)[1].close()
        return self._open[key]
