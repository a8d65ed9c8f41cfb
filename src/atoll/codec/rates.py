"""What the traffic of a run comes to."""

from __future__ import annotations

from atoll.codec.protocol import get_codec
from atoll.core import Layout, SyncConfig


def needed_bytes_s(config: SyncConfig, layout: Layout, direction: str, step_ns: float) -> float:
    """Bytes per second that a learner must move at most, up or down, to take part in every round."""
    codec = get_codec(config.codec_up if direction == "up" else config.codec_down)
    period_bytes = sum(codec.size_max(fragment.size) for fragment in layout.fragments)
    return period_bytes / (config.sync_every * step_ns / 1e9) if step_ns > 0 else 0.0
