"""The options of `atoll train` and `atoll run` that ask for faults. `atoll.app` adds them: the product has none."""

from __future__ import annotations

from atoll.cli import panel

STORM = panel(
    "Chaos",
    chaos=(
        str,
        "Faults on purpose: none, demo (kill one learner, slow another), storm (all kinds over the run), or a "
        "TOML file of faults (default none).",
    ),
    chaos_seed=(int, "Seed of what a storm draws (default 0)."),
    storm_minutes=(float, "Length of the storm where no budget of steps and time tells it (default 10)."),
)
