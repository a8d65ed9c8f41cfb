"""What must always be true: one checker per invariant of RELIABILITY, fed with plain facts.

The simulator and the storms on real processes use the same checkers; where the facts come from is theirs to say.
I12 (quality) is a comparison of two runs' losses, which the storm's scorecard makes.
"""

from atoll.check.at_most_once import AtMostOnce
from atoll.check.blast_radius import BlastRadius
from atoll.check.bounded import Bounded
from atoll.check.checker import Checker, Checkers, Violation
from atoll.check.commit_first import CommitFirst
from atoll.check.finite import Finite
from atoll.check.influence import BoundedInfluence
from atoll.check.ledger import LedgerAddsUp
from atoll.check.liveness import Liveness
from atoll.check.loud import Loud
from atoll.check.model_moves import ModelMoves
from atoll.check.replayed import ReplayIsExact
from atoll.check.single_writer import SingleWriter
from atoll.check.version_chain import VersionChain

__all__ = [
    "AtMostOnce",
    "BlastRadius",
    "Bounded",
    "BoundedInfluence",
    "Checker",
    "Checkers",
    "CommitFirst",
    "Finite",
    "LedgerAddsUp",
    "Liveness",
    "Loud",
    "ModelMoves",
    "ReplayIsExact",
    "SingleWriter",
    "VersionChain",
    "Violation",
    "all_checkers",
]


def all_checkers(*, outlier_factor: float = 10.0, sync_every: int, step_factor_min: float = 1.0) -> Checkers:
    """Every checker. The numbers are the run's own settings (norm_outlier_factor, H, where its outer_schedule ends)."""
    return Checkers(
        [
            VersionChain(),
            AtMostOnce(),
            LedgerAddsUp(),
            CommitFirst(),
            Liveness(),
            BlastRadius(),
            Finite(),
            BoundedInfluence(outlier_factor, sync_every=sync_every),
            ReplayIsExact(),
            Bounded(),
            SingleWriter(),
            Loud(),
            ModelMoves(step_factor_min),
        ]
    )
