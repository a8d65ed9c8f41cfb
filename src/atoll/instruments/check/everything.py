"""Every checker there is."""

from __future__ import annotations

import math

from atoll.instruments.check.at_most_once import AtMostOnce
from atoll.instruments.check.blast_radius import BlastRadius
from atoll.instruments.check.bounded import Bounded
from atoll.instruments.check.checker import Checkers
from atoll.instruments.check.commit_first import CommitFirst
from atoll.instruments.check.copied import CopyFirst
from atoll.instruments.check.fenced import FencedSaysNothing
from atoll.instruments.check.finite import Finite
from atoll.instruments.check.gathered import GatheredOnce
from atoll.instruments.check.influence import BoundedInfluence
from atoll.instruments.check.ledger import LedgerAddsUp
from atoll.instruments.check.liveness import Liveness
from atoll.instruments.check.loud import Loud
from atoll.instruments.check.model_moves import ModelMoves
from atoll.instruments.check.one_owner import OneOwner
from atoll.instruments.check.replayed import ReplayIsExact
from atoll.instruments.check.single_writer import SingleWriter
from atoll.instruments.check.trust import BoundedTrust
from atoll.instruments.check.version_chain import VersionChain
from atoll.instruments.check.whole_moves import WholeMoves


def all_checkers(
    *,
    outlier_factor: float = 10.0,
    sync_every: int,
    step_factor_min: float = 1.0,
    share_max: float = 1.0,
    norm_max: float = math.inf,
    liar: str = "",
) -> Checkers:
    """Every checker. The numbers are the run's own settings (norm_outlier_factor, H, where its outer_schedule ends,
    share_max, the longest norm of all); `liar` is the learner that is known to lie."""
    return Checkers(
        [
            VersionChain(),
            AtMostOnce(),
            LedgerAddsUp(),
            CommitFirst(),
            Liveness(),
            BlastRadius(),
            Finite(),
            BoundedInfluence(outlier_factor, sync_every=sync_every, liar=liar),
            ReplayIsExact(),
            Bounded(),
            SingleWriter(),
            Loud(),
            ModelMoves(step_factor_min, sync_every=sync_every, share_max=share_max),
            BoundedTrust(norm_max),
            FencedSaysNothing(),
            CopyFirst(),
            OneOwner(),
            GatheredOnce(),
            WholeMoves(),
        ]
    )
