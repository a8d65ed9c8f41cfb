"""`atoll.jax.Learner`: what a user puts into a JAX loop.

Arrays cannot be changed in place, so `step` takes the parameters and gives them back, with what was published adopted.
Nothing in it blocks: snapshots and adopts are dispatched to the device as a training step is, and no host callback is
inside the user's own compiled step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, SupportsIndex

import jax

from atoll.core import LearnerMachine, SyncConfig
from atoll.errors import LocalProtocolError
from atoll.jax.inner import JaxInner
from atoll.jax.island import SpreadLearner, is_island, rank_parameters
from atoll.jax.parameters import JaxParameters, Names, Tree
from atoll.learner import (
    CHECKPOINT_EVERY_S,
    ISLAND_TIMEOUT_S,
    JOIN_TIMEOUT_S,
    WARMUP_STEPS,
    AttachedData,
    RunView,
    Stateful,
)
from atoll.observe import Writer


class Learner:
    """One island of the run. Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        params: Tree,
        opt_state: Tree | None = None,
        *,
        names: Names | None = None,
        merge_modes: Mapping[str, str] | None = None,
        address: str | None = None,
        learner_id: str | None = None,
        token: str | None = None,
        tls_ca: str | None = None,
        run_folder: str | Path | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        stripes: int = 1,
        kernel_threads: int = 1,
        checkpoint_every_s: float = CHECKPOINT_EVERY_S,
        leave_on_sigterm: bool = True,
        island_timeout_s: float = ISLAND_TIMEOUT_S,
    ) -> None:
        """`params` is the pytree that is trained, `opt_state` the optimizer's (optax or any other pytree); it is kept
        over deaths and given to joiners. `names` maps paths of the tree to the run's names, for runs with learners of
        other frameworks: see `atoll.jax.parameters`. The rest is as in `atoll.Learner`.

        Where arrays are cut over the processes of `jax.distributed`, each of them makes a Learner and calls it in the
        same way, and they are one learner; `step(tokens=)` takes what this process has read."""
        self._inner: JaxInner | None = None
        self._loss: Any = None
        self._parameters: JaxParameters
        part, mesh, parameters, link = "", None, None, None
        if is_island(params):
            parameters, held, link = rank_parameters(params, names, merge_modes, address, island_timeout_s)
            self._parameters, part, mesh = held, f"rank-{link.rank}-of-{link.size}", held.mesh
        else:
            self._parameters = JaxParameters(params, names=names, merge_modes=merge_modes)

        def inner(machine: LearnerMachine | RunView, writer: Writer, folder: Path | None) -> JaxInner:
            self._inner = JaxInner(opt_state, folder, checkpoint_every_s, machine, writer, part, mesh)
            return self._inner

        self._learner = SpreadLearner(
            parameters or self._parameters,
            inner=inner,
            link=link,
            address=address,
            learner_id=learner_id,
            token=token,
            tls_ca=tls_ca,
            run_folder=run_folder,
            join_timeout_s=join_timeout_s,
            stripes=stripes,
            kernel_threads=kernel_threads,
            leave_on_sigterm=leave_on_sigterm,
        )

    # ------------------------------------------------------------ joining and leaving

    def __enter__(self) -> Self:
        return self.start()

    def start(self) -> Self:
        """Join the run: from here on `params` holds the run's published parameters, and `opt_state` the best optimizer
        state there is."""
        self._learner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._learner.__exit__(kind, error, trace)

    def close(self, *, flush: bool = True, reason: str = "finished") -> None:
        """Leave the run; with `flush` what was trained is handed over first."""
        self._learner.close(flush=flush, reason=reason)

    def end_accordingly(self) -> None:
        """As of `atoll.Learner`."""
        self._learner.end_accordingly()

    # ------------------------------------------------------------ training

    def step(
        self, params: Tree, opt_state: Tree | None = None, *, tokens: SupportsIndex, loss: SupportsFloat | None = None
    ) -> Tree:
        """Tell Atoll that one optimizer step is done, and what it led to. Returns the parameters to go on with.
        `opt_state` is what the checkpoint keeps. `loss` may be an array that is still being computed: the newest that
        is there is reported."""
        assert self._inner is not None
        if opt_state is not None:
            if not self._inner.given:
                raise LocalProtocolError("this learner was made without opt_state; give it to atoll.jax.Learner, too")
            self._inner.state = opt_state
        self._parameters.tree = params
        self._learner.step(tokens, self._newest(loss))
        return self._parameters.tree

    def _newest(self, loss: SupportsFloat | None) -> SupportsFloat | None:
        """Reading an array that is not there yet would wait for the device: then the one before is told."""
        waiting, self._loss = self._loss, loss
        return loss if _is_there(loss) else waiting if _is_there(waiting) else None

    @property
    def params(self) -> Tree:
        """The parameters to go on with; after joining, the run's."""
        return self._parameters.tree

    @property
    def opt_state(self) -> Tree | None:
        """The optimizer state to go on with: after joining that of this learner's checkpoint, or a peer's, if there was
        one."""
        assert self._inner is not None
        return self._inner.state

    @property
    def warmup_factor(self) -> float:
        """Less than 1 in the first steps of a learner that found no optimizer state: multiply the learning rate by
        it."""
        assert self._inner is not None
        return 1.0 - self._inner.warmup_left / (WARMUP_STEPS + 1)

    def published(self) -> Tree:
        """The published parameters that this learner has adopted: evaluate and save these, not a replica."""
        with self._learner.global_params():
            return self._parameters.tree

    # ------------------------------------------------------------ what the loop may ask: see ParametersLearner

    @property
    def done(self) -> bool:
        """True when the run's token budget is spent: leave the loop."""
        return self._learner.done

    @property
    def step_count(self) -> int:
        """This learner's place in the run, for learning-rate schedules."""
        return self._learner.step_count

    @property
    def learner_id(self) -> str:
        return self._learner.learner_id

    @property
    def rank(self) -> int:
        """A number that no other learner of the run has: to choose its part of the data."""
        return self._learner.rank

    @property
    def world(self) -> int:
        """Into how many parts to divide the data."""
        return self._learner.world

    @property
    def island_rank(self) -> int:
        """Which process of its learner this is: 0 to island_size - 1. Each reads data of its own."""
        return self._learner.island_rank

    @property
    def island_size(self) -> int:
        """How many processes this learner has."""
        return self._learner.island_size

    @property
    def generation(self) -> int:
        return self._learner.generation

    @property
    def config(self) -> SyncConfig:
        """The run's settings, as the syncer gave them."""
        return self._learner.config

    @property
    def handed_over(self) -> bool:
        """False once `close` has ended without the syncer's word that what this learner trained is safe with it."""
        return self._learner.handed_over

    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner has adopted."""
        return self._learner.versions()

    def keep(self, name: str, extra: Stateful) -> None:
        """Add something with state_dict and load_state_dict (of what JSON can say) to this learner's checkpoints."""
        self._learner.keep(name, extra)

    def attach_data(self, source: AttachedData) -> None:
        """For `atoll.data`."""
        self._learner.attach_data(source)

    def poke_data(self, source: AttachedData) -> None:
        """For `atoll.data`."""
        self._learner.poke_data(source)


def _is_there(loss: Any) -> bool:
    return not isinstance(loss, jax.Array) or bool(getattr(loss, "is_ready", lambda: True)())
