"""Hugging Face Trainer as a learner: one callback.

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[AtollCallback()])
    trainer.train()

and `atoll run --learners 4 -- python script.py`. The Trainer's step count is the run's: a late joiner starts in the
middle of the schedule, and `max_steps` is the length of the run. Evaluations and saves are of the published model, and
so is the model after `train()`. When the run's token budget is spent, training stops.
"""

from __future__ import annotations

from typing import Any

from atoll.errors import ConfigError
from atoll.integrations.loop import LearnerLoop, forward_schedule, samplers_of

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise ConfigError("atoll.integrations.hf needs transformers: pip install 'atoll[integrations]'") from error


class AtollCallback(TrainerCallback):  # type: ignore[misc,unused-ignore]  # transformers may come without types
    def __init__(self, tokens_per_step: int = 0, **options: Any) -> None:
        """`tokens_per_step`: for models whose inputs the Trainer cannot count; 0: it counts them. Where a learner has
        several ranks it is what each of them reads for one step. The options are those of `atoll.Learner`."""
        self._loop = LearnerLoop(options)
        self._tokens_per_step = tokens_per_step
        self._tokens_told = 0

    @property
    def learner(self) -> Any:
        """The `atoll.Learner`, once training has begun."""
        return self._loop.learner

    # ------------------------------------------------------------ beginning and end

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if not self._tokens_per_step and str(args.include_num_input_tokens_seen) in ("no", "False"):
            args.include_num_input_tokens_seen = "all"

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **run: Any) -> None:
        learner = self._loop.begin(run["model"], run["optimizer"])
        state.global_step = learner.step_count
        self._tokens_told = state.num_input_tokens_seen
        forward_schedule(run["lr_scheduler"], learner.step_count)
        self._loop.seed(samplers_of(run.get("train_dataloader")))
        if learner.done or state.global_step >= state.max_steps > 0:
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._loop.end()

    # ------------------------------------------------------------ while training

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._loop.show_own()

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._loop.show_own()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.learner.step(tokens=self._tokens(state))
        if self.learner.done:
            control.should_training_stop = True
        self._before_looking(control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._before_looking(control)

    def _before_looking(self, control: TrainerControl) -> None:
        if control.should_evaluate or control.should_save:
            self._loop.show_published()

    def _tokens(self, state: TrainerState) -> int:
        if self._tokens_per_step:
            return self._tokens_per_step
        told, self._tokens_told = self._tokens_told, int(state.num_input_tokens_seen)
        if self._tokens_told <= told:
            raise ConfigError("the Trainer cannot count this model's tokens; give AtollCallback(tokens_per_step=...)")
        return own_share(self._tokens_told - told, self.learner)


def own_share(tokens: int, learner: Any) -> int:
    """The Trainer adds up what all ranks have read, and the island what its ranks say: so each says a part of it."""
    share, over = divmod(tokens, int(learner.island_size))
    return share + (int(learner.island_rank) < over)
