"""What both storms of messages are made of: numbers that may be, numbers that cannot, models and settings.

A storm is a machine under messages that are well formed and make no sense: any field, any order, any state. See
`fuzz_syncer_storm` and `fuzz_learner_storm`.
"""

from __future__ import annotations

from random import Random

from atoll.core import messages as m
from atoll.core.config import SyncConfig

STEPS = 200
"""Acts of one storm."""
SYNCER_STORMS = 60
LEARNER_STORMS = 120
INPUTS_MIN = {"syncer": 12_000, "learner": 20_000}
"""Inputs that these storms come to at least, a case each: a storm ends early when its learner leaves or its syncer is
fenced out."""
LARGE = 2**62
"""The wire's own bound on counters."""
NAMES = ("a", "b", "c")
MODELS = (
    tuple(m.TensorSpec(f"w{i}", (256,), "float32") for i in range(4)),
    (m.TensorSpec("v", (4096,), "bfloat16", "mean"),),
    (m.TensorSpec("huge", (LARGE,) * 20, "float32"),),
    (m.TensorSpec("w", (256,), "float32"), m.TensorSpec("w", (256,), "float32")),
    (m.TensorSpec("w", (1, 1), "float128"),),
    (),
)
SECOND_NS = 10**9


def count(rng: Random, *likely: int) -> int:
    """One of the likely numbers, or one near it, or anything that the wire lets through."""
    if likely and rng.random() < 0.75:
        return min(LARGE, max(0, rng.choice(likely) + rng.choice((0, 0, 0, 0, 1, -1))))
    return rng.choice((0, 1, 2, 3, 24, 4095, 2**31, 2**53, LARGE - 1, LARGE))


def version(rng: Random, *likely: int) -> int:
    return -1 if rng.random() < 0.1 else count(rng, *likely)


def config_of(rng: Random) -> SyncConfig:
    expected = rng.choice((1, 2, 3))
    return SyncConfig(
        sync_every=rng.choice((1, 4, 24)),
        fragments=rng.choice((0, 1, 4, 4)),
        overlap=rng.choice((0, 2)),
        quorum=rng.choice(("1", "50%", "all")),
        learners_expected=expected,
        grace_cap_steps=rng.choice((0.0, 1.0, 1000.0)),
        weights=rng.choice(("tokens2_per_step", "tokens", "uniform")),
        age_discount=rng.choice((1.0, 0.5, 0.0)),
        adopt=rng.choice(("rebase", "overwrite", "mix:0.5")),
        carry_versions_max=rng.choice((0, 4)),
        norm_outlier_factor=rng.choice((1.0, 10.0)),
        tokens_budget=rng.choice((0, 0, 0, 5000)),
    )
