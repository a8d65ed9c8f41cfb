"""Lightning's Trainer as a learner: one callback.

    trainer = Trainer(max_steps=1000, callbacks=[AtollCallback(tokens=lambda batch: batch.numel())])
    trainer.fit(module, loader)

and `atoll run --learners 4 -- python script.py`. The Trainer's step count is the run's, so `max_steps` and schedules
are right for late joiners and after a restart. Validation and checkpoints are of the published model, and so is the
module after `fit`. When the run's token budget is spent, training stops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from atoll.errors import ConfigError
from atoll.integrations.loop import LearnerLoop, forward_schedule, samplers_of

try:
    import lightning.pytorch as lightning
except ImportError:
    try:
        import pytorch_lightning as lightning
    except ImportError as error:
        raise ConfigError("atoll.integrations.lightning needs lightning: pip install 'atoll[integrations]'") from error


class AtollCallback(lightning.Callback):  # type: ignore[misc,name-defined,unused-ignore]
    def __init__(self, tokens: Callable[[Any], int], **options: Any) -> None:
        """`tokens` says how many tokens (or samples) a batch has. The options are those of `atoll.Learner`."""
        self._loop = LearnerLoop(options)
        self._count = tokens
        self._tokens = 0
        self._steps_seen = 0

    @property
    def learner(self) -> Any:
        """The `atoll.Learner`, once training has begun."""
        return self._loop.learner

    # ------------------------------------------------------------ beginning and end

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.optimizers:
            raise ConfigError("this module trains without an optimizer of the Trainer; Atoll cannot keep its state")
        learner = self._loop.begin(pl_module, list(trainer.optimizers))
        _set_global_step(trainer, learner.step_count)
        self._steps_seen = trainer.global_step
        for entry in trainer.lr_scheduler_configs:
            if entry.interval == "step":
                forward_schedule(entry.scheduler, learner.step_count)
        loaders = trainer.fit_loop._combined_loader
        self._loop.seed(
            [sampler for loader in (loaders.flattened if loaders else ()) for sampler in samplers_of(loader)]
        )
        if learner.done:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if not isinstance(exception, SystemExit):  # SIGTERM: the learner has left by itself
            self._loop.end(finished=False)

    # ------------------------------------------------------------ while training

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """With accumulated gradients most batches are no step."""
        self._tokens += int(self._count(batch))
        if trainer.global_step == self._steps_seen:
            return
        self._steps_seen, tokens, self._tokens = trainer.global_step, self._tokens, 0
        self.learner.step(tokens=tokens, loss=_loss_of(outputs))
        if self.learner.done:
            trainer.should_stop = True

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._loop.show_published()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._loop.show_own()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The file holds the published parameters, wherever in the loop it is written."""
        published = self.learner.published_state_dict()
        state = checkpoint["state_dict"]
        state.update({name: value.to(state[name].dtype) for name, value in published.items() if name in state})


def _set_global_step(trainer: Any, step: int) -> None:
    """`trainer.global_step` is a sum over the optimizers' own counts."""
    loop = trainer.fit_loop.epoch_loop
    for optimization in (loop.automatic_optimization, loop.manual_optimization):
        progress = getattr(optimization, "optim_progress", None)
        total = progress.optimizer.step.total if progress is not None else optimization.optim_step_progress.total
        total.ready = total.completed = step if optimization is loop.automatic_optimization else 0


def _loss_of(outputs: Any) -> Any:
    return outputs.get("loss") if isinstance(outputs, dict) else None
