"""What every trainer with callbacks needs of a learner, whatever the library."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import xxhash
from torch import nn

from atoll.errors import ConfigError
from atoll.learner import Learner

SEEDS = 2**40
"""Seeds that learners draw from by their ids: so many that two of a thousand hardly come within each other's epochs."""


_TRAINING: weakref.WeakSet[LearnerLoop] = weakref.WeakSet()
"""The loops of this process that have joined a run."""


class LearnerLoop:
    """A learner that is made when training begins, and the published model in the place of the own one for a while."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._learner: Learner | None = None
        self._swapped: ExitStack | None = None

    @property
    def learner(self) -> Learner:
        """The learner of the run; there while it trains, and after."""
        if self._learner is None:
            raise ConfigError("there is a learner once training has begun: ask for it in the loop, or after it")
        return self._learner

    def begin(self, model: nn.Module, optimizer: Any) -> Learner:
        """Join the run: the model holds its parameters when this returns."""
        if self._learner is not None and not self._learner.closed:
            raise ConfigError("this callback is in a trainer that trains already; give each trainer its own")
        learner = Learner(model, optimizer, **self._options)
        if any(other.learner.learner_id == learner.learner_id for other in _TRAINING if not other.learner.closed):
            raise ConfigError(
                f"Atoll trains as {learner.learner_id} in this process already: two callbacks are in one trainer, or a "
                "second trainer runs beside the first; give one callback to one trainer at a time, or another "
                "learner_id to each"
            )
        self._learner = learner.start()
        _TRAINING.add(self)
        return self._learner

    def show_published(self) -> None:
        """Until `show_own` the model is the published one: evaluate and save that."""
        if self._swapped is None:
            self._swapped = ExitStack()
            self._swapped.enter_context(self.learner.global_params())

    def show_own(self) -> None:
        if self._swapped is not None:
            self._swapped.close()
            self._swapped = None

    def end(self, *, finished: bool = True) -> None:
        """Leave the run. The model is the published one from here on."""
        self.show_own()
        if self._learner is not None and not self._learner.closed:
            self._learner.close(flush=finished, reason="finished" if finished else "an error ended the training")
            self._learner.adopt_published()
            self._learner.end_accordingly()

    def seed(self, samplers: Sequence[Any]) -> None:
        """Learners that shuffle with one seed would all read the same batches, and a restarted one would read its own
        again. So samplers that have a seed get one of this learner's own, which is the same on all of its ranks."""
        who = f"{self.learner.learner_id}, generation {self.learner.generation}"
        apart = xxhash.xxh3_64_intdigest(who.encode()) % SEEDS
        for sampler in samplers:
            if isinstance(getattr(sampler, "initial_seed", None), int):  # accelerate's
                sampler.initial_seed += apart
            elif isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(sampler.generator.initial_seed() + apart)
            elif isinstance(getattr(sampler, "seed", None), int):  # torch's DistributedSampler
                sampler.seed += apart


def samplers_of(loader: Any) -> list[Any]:
    """Whatever draws the order of a data loader's samples, also inside of what shares batches out to ranks."""
    found = [loader]
    for one in found:
        below = [getattr(one, name, None) for name in ("sampler", "batch_sampler")]
        found += [it for it in below if it is not None and not any(it is known for known in found)]
    return found[1:]


def forward_schedule(scheduler: Any, steps: int) -> None:
    """Bring a learning-rate schedule to where the run is: a late joiner does not warm up again. Step by step, because
    most schedules work each rate out from the one before."""
    scheduler = getattr(scheduler, "scheduler", scheduler)  # accelerate wraps it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the optimizer has not stepped: it has, elsewhere
        for _ in range(steps - getattr(scheduler, "last_epoch", steps)):
            scheduler.step()
