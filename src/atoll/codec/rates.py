"""What the traffic of a run comes to."""

from __future__ import annotations

from atoll.codec.fragments import fragment_codec
from atoll.core import Layout, SyncConfig


def run_bytes(codec: str, layout: Layout) -> int:
    """The most bytes that one round of every fragment takes in this codec, one way."""
    return sum(fragment_codec(codec, layout, f.index).size_max(f.size) for f in layout.fragments)


def needed_bytes_s(config: SyncConfig, layout: Layout, direction: str, step_ns: float) -> float:
    """Bytes per second that a learner must move at most, up or down, to take part in every round."""
    period_bytes = run_bytes(config.codec_up if direction == "up" else config.codec_down, layout)
    return period_bytes / (config.sync_every * step_ns / 1e9) if step_ns > 0 else 0.0
