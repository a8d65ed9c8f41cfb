"""torchtitan's trainer as a learner: its own class, with Atoll at every step boundary.

    from torchtitan.train import main
    from atoll.integrations.titan import AtollTrainer

    main(AtollTrainer)

and `atoll run --learners 4 -- python script.py --job.config_file train.toml`. The trainer's step count is the run's:
`training.steps` is the length of the run, and a late joiner starts in the middle of the schedule. Validation is of the
published model. When the run's token budget is spent, training stops. What torchtitan's own checkpoints hold is this
island's state, for restarts of its own; the run's model is what `atoll export` gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from atoll.errors import ConfigError
from atoll.integrations.loop import LearnerLoop, forward_schedule

try:
    from torchtitan.train import Trainer
except ImportError as error:
    raise ConfigError(
        f"atoll.integrations.titan needs torchtitan and what that needs ({error}): pip install 'atoll[titan]'"
    ) from error


class AtollTrainer(Trainer):  # type: ignore[misc,unused-ignore]  # torchtitan may come without types
    learner_options: dict[str, Any] = {}  # noqa: RUF012 - a subclass says other options of `atoll.Learner`

    def __init__(self, job_config: Any) -> None:
        super().__init__(job_config)
        self._loop: LearnerLoop | None = None
        self._losses: list[torch.Tensor] = []

    @property
    def learner(self) -> Any:
        """The `atoll.Learner`, once training has begun."""
        if self._loop is None:
            raise ConfigError("there is a learner once training has begun: ask for it in the loop, or after it")
        return self._loop.learner

    # ------------------------------------------------------------ beginning and end

    def train(self) -> None:
        finished = False
        try:
            super().train()
            finished = True
        finally:
            if self._loop is not None:
                self._loop.end(finished=finished)

    def _join(self) -> LearnerLoop:
        """After torchtitan has loaded its own checkpoint: the run knows better where it is."""
        if len(self.model_parts) != 1:
            raise ConfigError(
                "this rank has several pipeline stages; use one per rank (a schedule without virtual ones)"
            )
        loop = LearnerLoop(dict(self.learner_options))
        learner = loop.begin(self.model_parts[0], list(self.optimizers.optimizers))
        self.step = learner.step_count
        for scheduler in self.lr_schedulers.schedulers:
            forward_schedule(scheduler, learner.step_count)
        if self.job_config.validation.enable:
            self.validator.validate = _published(loop, self.validator.validate)
        return loop

    # ------------------------------------------------------------ while training

    def should_continue_training(self) -> bool:
        if self._loop is None:
            self._loop = self._join()
        return not self.learner.done and bool(super().should_continue_training())

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        loss: torch.Tensor = super().forward_backward_step(**batch)
        self._losses.append(loss.detach())
        return loss

    def train_step(self, data_iterator: Iterator[Any]) -> None:
        before = self.ntokens_seen
        self._losses = []
        super().train_step(data_iterator)
        loss = torch.stack(self._losses).sum() if self._losses else None
        self.learner.step(tokens=self.ntokens_seen - before, loss=loss)


def _published(loop: LearnerLoop, validate: Any) -> Any:
    def validate_published(*arguments: Any, **named: Any) -> Any:
        loop.show_published()
        try:
            return validate(*arguments, **named)
        finally:
            loop.show_own()

    return validate_published
