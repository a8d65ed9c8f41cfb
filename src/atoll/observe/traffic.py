"""Bytes: what went through the syncers of a run, and what data-parallel training would have sent for the same steps."""

from __future__ import annotations

from atoll.observe.events import Event, SyncerStarted, SyncerStats

BF16_BYTES = 2
SOURCES_MAX = 64
"""Syncer processes whose counters may still grow: far more than can be stopped and forgotten before they are fenced."""


def data_parallel_bytes(parameters: int, learner_steps: int, learners: int) -> int:
    """Bytes sent by all learners together in a ring all-reduce of bf16 gradients at every step.

    In a ring of M each learner sends 2 * (M - 1) / M of the gradient per step (reduce-scatter, then all-gather):

        bytes = learner_steps * 2 * (M - 1) / M * 2 bytes * parameters

    `learner_steps` is the sum of steps over the learners. One learner alone sends nothing.
    """
    if learners <= 1:
        return 0
    return 2 * (learners - 1) * BF16_BYTES * parameters * learner_steps // learners


class SyncerTotals:
    """The statistics of a run over all of its syncers.

    A syncer that restarts goes on with the counts of commits and tokens, which are in its state, and begins its byte
    counters at 0: those are added up over processes. A process is told by its event file; within one file by its
    SyncerStarted, or by a counter that falls. What an old syncer still says after a new one has started counts as
    bytes, but not as the state of the run.
    """

    def __init__(self) -> None:
        self.stats: SyncerStats | None = None
        """The newest of the syncer that serves."""
        self._ended = (0, 0)
        self._bytes: dict[str, tuple[int, int]] = {}  # (up, down) of each process that may go on, by its file
        self._serving = ""

    def apply(self, event: Event, source: str = "") -> None:
        """`source` is the stem of the file that the event is from."""
        if isinstance(event, SyncerStats):
            up, down = self._bytes.get(source, (0, 0))
            if event.bytes_up < up or event.bytes_down < down:
                self._end(source)
            self._bytes[source] = (event.bytes_up, event.bytes_down)
            if source == self._serving or not self._serving:
                self.stats = event
        elif isinstance(event, SyncerStarted):
            self._end(source)
            self._serving = source
            if len(self._bytes) >= SOURCES_MAX:
                self._end(next(iter(self._bytes)))

    def _end(self, source: str) -> None:
        up, down = self._bytes.pop(source, (0, 0))
        self._ended = (self._ended[0] + up, self._ended[1] + down)

    @property
    def bytes_up(self) -> int:
        return self._ended[0] + sum(up for up, _ in self._bytes.values())

    @property
    def bytes_down(self) -> int:
        return self._ended[1] + sum(down for _, down in self._bytes.values())
