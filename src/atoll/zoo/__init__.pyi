from .corpus import Batches, Corpus, Shard, load_corpus
from .evaluate import autocast, eval_loss, held_out_batches, load_saved, save_model
from .gpt import GPT, build_model, next_byte_loss, sample
from .optim import CombinedOptimizer, clip_grad_norm, create_state, lr_at, make_optimizer, set_lr
from .pacing import SlowDown, StepReporter
from .presets import OPTIMIZERS, PRESETS, SCHEDULES, GPTConfig, count_parameters, model_config, own_lr
from .settings import METHODS, RANKS_FILE, STEP_MS_MAX, WorkerConfig, WorkerSeat

__all__ = [
    "GPT",
    "METHODS",
    "OPTIMIZERS",
    "PRESETS",
    "RANKS_FILE",
    "SCHEDULES",
    "STEP_MS_MAX",
    "Batches",
    "CombinedOptimizer",
    "Corpus",
    "GPTConfig",
    "Shard",
    "SlowDown",
    "StepReporter",
    "WorkerConfig",
    "WorkerSeat",
    "autocast",
    "build_model",
    "clip_grad_norm",
    "count_parameters",
    "create_state",
    "eval_loss",
    "held_out_batches",
    "load_corpus",
    "load_saved",
    "lr_at",
    "make_optimizer",
    "model_config",
    "next_byte_loss",
    "own_lr",
    "sample",
    "save_model",
    "set_lr",
]
