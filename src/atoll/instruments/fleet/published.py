"""The published figures (arXiv 2604.21428, collected second-hand) that the simulator is held against."""

from __future__ import annotations

from atoll.instruments.fleet.mechanics import MTBI_YEARS, YEAR_S

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
GOODPUT: dict[tuple[str, int], tuple[float, ...]] = {
    ("inelastic", 1): (72, 57, 38, 27, 18),
    ("elastic", 1): (88, 80, 69, 58, 40),
    ("decoupled", 2): (94, 88, 80, 70, 54),
    ("decoupled", 4): (96, 93, 89, 82, 73),
    ("decoupled", 8): (98, 96, 94, 88, 80),
    ("decoupled", 16): (99, 98, 96, 93, 86),
}
"""Table 1: (method, learners) -> percent, for each number of chips; one interruption per chip and year."""
HETEROGENEOUS = {"K=8": 84.0, "K=1": 100.0, "K=1 + grace": 100.0}
"""Eight learners, four of them 18% slower, and 10% variance: goodput by quorum."""
SCAVENGING: dict[int, tuple[float | None, float]] = {
    0: (1.00, 1.00),
    25: (1.07, 0.90),
    50: (1.09, 0.83),
    100: (1.02, 0.75),
    300: (None, 0.62),
}
"""Extra learners in percent of the base of four -> time relative to none: (data-parallel, decoupled). The sources
disagree on data-parallel at 300% (0.80 or 1.02)."""


def published_goodput(chips: int, learners: int, method: str, mtbi_s: float) -> float | None:
    """The published figure of this cell, if there is one."""
    row = GOODPUT.get((method, learners))
    if row is None or chips not in CHIPS or abs(mtbi_s / (MTBI_YEARS * YEAR_S) - 1.0) > 1e-6:
        return None
    return float(row[CHIPS.index(chips)])
