"""Scalars for TensorBoard: its own event files, without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardWriter:
    """Writes to FOLDER/NAME (default runs/tensorboard)."""

    def __init__(self, where: str, name: str, settings: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file: Any = EventFileWriter(str(Path(where or "runs/tensorboard") / name))

    def scalars(self, values: Mapping[str, float], *, tokens: int, time_s: float) -> None:
        points = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._file.add_event(self._event(wall_time=time_s, step=tokens, summary=self._summary(value=points)))

    def close(self) -> None:
        self._file.close()
