"""The zoo: the small reference GPT and the corpora that the demo, the lab and the benchmarks share.

This front door imports neither torch nor numpy: names are loaded from their module when first used, so that the command
line can list presets and build a `WorkerConfig` at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.zoo.corpus import Batches, Corpus, Shard, load_corpus
    from atoll.zoo.evaluate import eval_loss, load_saved, save_model
    from atoll.zoo.gpt import GPT, build_model, sample
    from atoll.zoo.optim import lr_at, make_optimizer, set_lr
    from atoll.zoo.pacing import SlowDown, StepMeter
    from atoll.zoo.presets import PRESETS, GPTConfig, count_parameters, model_config
    from atoll.zoo.settings import METHODS, RANKS_FILE, Seat, WorkerConfig

_HOMES = {
    "GPT": "gpt",
    "build_model": "gpt",
    "sample": "gpt",
    "GPTConfig": "presets",
    "PRESETS": "presets",
    "count_parameters": "presets",
    "model_config": "presets",
    "Batches": "corpus",
    "Corpus": "corpus",
    "Shard": "corpus",
    "load_corpus": "corpus",
    "eval_loss": "evaluate",
    "load_saved": "evaluate",
    "save_model": "evaluate",
    "lr_at": "optim",
    "make_optimizer": "optim",
    "set_lr": "optim",
    "SlowDown": "pacing",
    "StepMeter": "pacing",
    "METHODS": "settings",
    "RANKS_FILE": "settings",
    "Seat": "settings",
    "WorkerConfig": "settings",
}

__all__ = [
    "GPT",
    "METHODS",
    "PRESETS",
    "RANKS_FILE",
    "Batches",
    "Corpus",
    "GPTConfig",
    "Seat",
    "Shard",
    "SlowDown",
    "StepMeter",
    "WorkerConfig",
    "build_model",
    "count_parameters",
    "eval_loss",
    "load_corpus",
    "load_saved",
    "lr_at",
    "make_optimizer",
    "model_config",
    "sample",
    "save_model",
    "set_lr",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'atoll.zoo' has no attribute {name!r}")
    return getattr(importlib.import_module(f"atoll.zoo.{_HOMES[name]}"), name)
