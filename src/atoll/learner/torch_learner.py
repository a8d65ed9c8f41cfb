"""`atoll.Learner`: what a user puts into a PyTorch loop.

    with atoll.Learner(model, optimizer) as learner:
        for batch in data:
            ...; optimizer.step(); learner.step(tokens=batch.numel())

`step` is called once per optimizer step (with gradient accumulation: once per update, with the tokens of all of its
micro-batches). It never waits for the network, unless the run was configured as synchronous (overlap 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsFloat, cast

import torch
from torch import nn

from atoll.core import LearnerMachine
from atoll.errors import ConfigError, LocalProtocolError
from atoll.learner.buffers import KeptBuffers, local_statistics
from atoll.learner.checks import check_model, check_optimizer, refuse_fsdp1
from atoll.learner.inner_recovery import InnerRecovery
from atoll.learner.inner_state import BUFFERS, CHECKPOINT_EVERY_S, Stateful
from atoll.learner.island.gloo import GlooLink
from atoll.learner.island.inner import recover_together
from atoll.learner.island.link import ISLAND_TIMEOUT_S, RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.peer_state import Came
from atoll.learner.island.picking import picking
from atoll.learner.island.seats import SpeakerSeat
from atoll.learner.island.speaker import SpeakerShell
from atoll.learner.island.torch_island import island_ranks, rank_parameters
from atoll.learner.island.torch_ranks import is_sharded
from atoll.learner.joining import JOIN_TIMEOUT_S
from atoll.learner.last_words import end_in_one_sentence
from atoll.learner.learner import ParametersLearner
from atoll.learner.losses import LossReader
from atoll.learner.names import named_parameters
from atoll.learner.torch_parameters import TorchParameters, trainable
from atoll.learner.view import RunView
from atoll.learner.watch import ModelWatch, frozen_checksum
from atoll.observe import Writer


class Learner(ParametersLearner):
    """One island of the run. Use it as a context manager, or call `start` and `close`."""

    _parameters: TorchParameters | RankParameters

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        address: str | None = None,
        learner_id: str | None = None,
        token: str | None = None,
        tls_ca: str | None = None,
        run_folder: str | Path | None = None,
        merge_modes: Mapping[str, str] | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        stripes: int = 1,
        kernel_threads: int = 1,
        copies_on_device: bool | None = None,
        extras: Mapping[str, Stateful] | None = None,
        checkpoint_every_s: float = CHECKPOINT_EVERY_S,
        leave_on_sigterm: bool = True,
        mesh: Any = None,
        group: Any = None,
        island_timeout_s: float = ISLAND_TIMEOUT_S,
    ) -> None:
        """`address`, `learner_id`, `token` and `run_folder` come from the environment that `atoll run` sets unless
        given here. `merge_modes` maps parameter names to "mean" or "rda" (as the run's `merge` says) where the
        rule of thumb (mean for embeddings and heads) is wrong. `stripes` is the number of bulk connections, for long
        fat links. `kernel_threads` bounds the CPU threads that encode and decode in the background. `copies_on_device`:
        what a learner keeps of its fragments lives on the model's GPU, which encodes and decodes, instead of on the
        host; 8 bytes of its memory per parameter and some more. None: if that is at most a tenth of it. Ranks of an
        island keep theirs on the host.

        With a run folder, the optimizer's state is kept there every `checkpoint_every_s` seconds (0: never), with
        random numbers and the `extras`: schedules and whatever else has state_dict and load_state_dict. A process that
        is started again under the same id continues with them. `leave_on_sigterm`: at SIGTERM, and when
        `atoll leave` asks this learner to go, the step under way is finished, everything is handed over, and the
        process exits with status 0, or with 4 (EXIT_NOT_HANDED_OVER) and a sentence on standard error where that did
        not succeed (unless the script handles SIGTERM itself). Without it `atoll leave` makes `done` true, and the
        script ends as it likes.

        Where torch.distributed has several ranks, each of them makes a Learner and calls it in the same way, and they
        are one learner: all of them, or those of `mesh` (a DeviceMesh) or `group`. A rank that does not come to a step
        for `island_timeout_s` seconds is an IslandError on the others."""
        end_in_one_sentence()
        ranks = island_ranks(model, mesh, group)
        link: GlooLink | None = None

        def check() -> None:
            if ranks is not None and copies_on_device:
                raise ConfigError(
                    "copies_on_device=True is for learners of one process: ranks of an island keep their copies on the "
                    "host; leave it out"
                )
            check_model(model)
            refuse_fsdp1(model)
            self._optimizer = check_optimizer(optimizer, model)

        if ranks is None:
            check()
            parameters: TorchParameters | RankParameters = TorchParameters(
                model, merge_modes, on_device=copies_on_device
            )
        else:
            parameters, link = rank_parameters(model, merge_modes, ranks, island_timeout_s, check)
        self._model = model
        self._losses = LossReader()
        self._watch: ModelWatch | None = None

        def inner(machine: LearnerMachine | RunView, writer: Writer, folder: Path | None) -> InnerRecovery:
            part = f"rank-{link.rank}-of-{link.size}" if link is not None else ""
            about = (self._optimizer, extras or {}, folder, checkpoint_every_s, machine, writer)
            return InnerRecovery(*about, part=part, names=names)

        def names() -> dict[int, str]:
            return {id(parameter): name for name, parameter in named_parameters(model)}

        super().__init__(
            parameters,
            inner=inner,
            link=link,
            frozen_checksum=self._frozen(parameters, link),
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

    def _frozen(self, parameters: TorchParameters | RankParameters, link: RankLink | None) -> int:
        if isinstance(parameters, RankParameters) and parameters.staged:
            return 0  # no rank has all of them
        return frozen_checksum(self._model) if link is None else frozen_checksum(self._model, picking(link))

    def start(self) -> Self:
        """Join the run: returns when the model holds the run's published parameters."""
        super().start()
        self._warn(local_statistics(self._model))
        return self

    def _model_joined(self) -> None:
        self._inner.keep(BUFFERS, KeptBuffers(self._model))
        names = [name for name, _ in trainable(self._model)]
        self._watch = ModelWatch(self._model, names, identities=not is_sharded(self._model))

    def _recover_together(self, link: RankLink) -> str:
        inner = cast(InnerRecovery, self._inner)
        if isinstance(self._seat, SpeakerSeat):
            self._seat.capture_due = lambda: inner.due
        asked = isinstance(self._shell, SpeakerShell) and self._shell.machine.wants_inner
        return recover_together(link, inner, self._machine, self._peer_state if asked else None)

    def _peer_state(self) -> Came | None:
        return cast(SpeakerShell, self._shell).inner

    def _read_loss(self, loss: SupportsFloat | None) -> float:
        return self._losses.read(loss)

    def _look_at_model(self, *, last: bool = False) -> str:
        if self._watch is None:
            return ""
        return self._watch.look() if last else self._watch.stepped()

    def adopt_published(self) -> None:
        """Put the published parameters that this learner has adopted into the model for good: after `close`, for
        evaluating and saving with other tools."""
        if not self.closed:
            raise LocalProtocolError("adopt_published is for a learner that was closed; global_params is for before")
        published = self.published_state_dict()
        with torch.no_grad():
            for name, parameter in trainable(self._model):
                parameter.copy_(published[name].view(parameter.shape))

    def published_state_dict(self) -> dict[str, torch.Tensor]:
        """The published parameters that this learner has adopted, by plain name: copies in fp32, as they are published,
        on the CPU. What is not synced (frozen parameters, buffers) is not in it. Also after the run."""
        vault = self._shell.vault
        if self._state == "new" or vault is None or any(p is None for p in vault.current):
            raise LocalProtocolError("published_state_dict needs a learner that has joined a run")
        held = self._parameters.held if isinstance(self._parameters, RankParameters) else self._parameters
        return cast(TorchParameters, held).named(self._shell.arrays.published())
