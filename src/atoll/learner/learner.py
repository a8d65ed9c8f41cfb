"""One learner, whatever its framework: joining, stepping and leaving, around `Parameters`.

`torch_learner.Learner` is what PyTorch users put into their loop; it is made of this. For another framework, write a
class with the methods of `parameters.Parameters` and give it to `ParametersLearner`:

    with ParametersLearner(MyParameters(model)) as learner:
        for batch in data:
            ...; learner.step(tokens=batch.size)

There is no framework in this file.
"""

from __future__ import annotations

import atexit
import math
import os
import secrets
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, SupportsFloat, SupportsIndex, cast

from atoll import kernels
from atoll.core import CLOSE_TIMEOUT_NS, LearnerMachine, SyncConfig, numbers
from atoll.core import effects as fx
from atoll.errors import LocalProtocolError
from atoll.learner import EXIT_NOT_HANDED_OVER, exit_status
from atoll.learner.doctor import Doctor
from atoll.learner.environment import find_place
from atoll.learner.inner_state import InnerState, NoInnerState, Stateful
from atoll.learner.island.follower import FollowerShell
from atoll.learner.island.link import SPEAKER, RankLink
from atoll.learner.island.parameters import RankParameters
from atoll.learner.island.seats import FollowerSeat, SpeakerSeat
from atoll.learner.island.speaker import SpeakerShell
from atoll.learner.joining import JOIN_TIMEOUT_S, recover
from atoll.learner.last_words import end_in_one_sentence
from atoll.learner.leave_deadline import LeaveDeadline
from atoll.learner.leaving import EXIT_IDLE, NEVER_STEPPED, sentence
from atoll.learner.meter import StepMeter, count_tokens
from atoll.learner.parameters import Parameters
from atoll.learner.preempt import Preemption
from atoll.learner.seat import Seat, SingleSeat
from atoll.learner.shell import AttachedData, LearnerShell
from atoll.learner.view import RunView
from atoll.observe import NullWriter, Writer, events
from atoll.plugins import load_entry_points
from atoll.wire import ClientOptions

STOP_S = CLOSE_TIMEOUT_NS / 1e9
"""How long the threads of a learner that has left may take to end."""


class ParametersLearner:
    """One island of the run. Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        parameters: Parameters[Any],
        *,
        inner: Callable[[LearnerMachine, Writer, Path | None], InnerState] | None = None,
        link: RankLink | None = None,
        frozen_checksum: int = 0,
        address: str | None = None,
        learner_id: str | None = None,
        token: str | None = None,
        tls_ca: str | None = None,
        run_folder: str | Path | None = None,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        stripes: int = 1,
        kernel_threads: int = 1,
        leave_on_sigterm: bool = True,
    ) -> None:
        """`parameters` is the model, as `parameters.Parameters` describes it. `inner` makes what keeps the optimizer's
        state over deaths, of this learner's machine, events and run folder; without it there is none, and a process
        that is started again begins with published parameters alone. `link` connects the processes of a learner that
        has several (`island`): each of them makes a learner, of `RankParameters`, and calls it in the same way.
        `frozen_checksum` is of what is not trained; learners whose ones differ are told. The rest is as in
        `atoll.Learner`."""
        end_in_one_sentence()
        load_entry_points()
        place = find_place(address=address, learner=learner_id, token=token, tls_ca=tls_ca, run_folder=run_folder)
        options = ClientOptions(
            address=place.address,
            token=place.token,
            tls_ca=place.tls_ca,
            stripes=stripes,
            clear_host=place.clear_host,
            tls_name=place.tls_name,
        )
        kernels.set_threads(kernel_threads)
        self._place = place
        self._parameters = parameters
        self._join_timeout_s = join_timeout_s
        self._link = link
        speaks = link is None or link.rank == SPEAKER
        self._preemption = Preemption() if leave_on_sigterm else None
        self.events: Writer = place.writer() if speaks else NullWriter()
        """Where this learner's events go; scripts may add their own, such as LearnerEvaluated."""
        self._doctor: Doctor | None = None
        self._machine: LearnerMachine | RunView
        self._shell: LearnerShell | FollowerShell
        self._seat: Seat
        self.island_name = ""
        """Drawn anew for every learner of several processes, the same on all of them: for keys in stores that others
        use as well."""
        learner = place.learner
        if link is not None:
            self.island_name, learner = link.compare(f"{secrets.token_hex(8)} {place.learner}")[SPEAKER].split(" ", 1)
        if speaks:
            machine = LearnerMachine(
                learner, secrets.token_hex(16), parameters.specs, frozen_checksum, orders_ahead=link is not None
            )
            shell = self._speaking(parameters, machine, options, link)
            self._machine, self._shell = machine, shell
            self._doctor = Doctor(options, learner, shell, patience_s=join_timeout_s)
        else:
            assert link is not None
            self._follow(cast(RankParameters, parameters), learner, link, options)
        self._meter = StepMeter(self.events, self._machine)
        self._inner = inner(self._machine, self.events, place.run_folder) if inner is not None else NoInnerState()
        give = self._inner.give if self._inner.shared else None
        if isinstance(self._shell, SpeakerShell | FollowerShell):
            self._shell.work.inner.give = give
        else:
            self._shell.give_inner = give
        self._state = "new"
        self._resumed = False
        self._unhanded_tokens = 0
        self._idle = False
        """It has left without having trained anything, although it could have."""

    def _speaking(
        self, parameters: Parameters[Any], machine: LearnerMachine, options: ClientOptions, link: RankLink | None
    ) -> LearnerShell:
        """The shell of the process that speaks with the syncer."""
        if link is None:
            shell = LearnerShell(parameters, machine, options, self.events)
            self._seat = SingleSeat(shell, self._preemption)
            return shell
        speaking = SpeakerShell(cast(RankParameters, parameters), machine, options, self.events, link)
        self._seat = SpeakerSeat(speaking, self._preemption, link)
        return speaking

    def _follow(self, parameters: RankParameters, learner: str, link: RankLink, options: ClientOptions) -> None:
        """This process does as the one that speaks says."""
        shell, view = FollowerShell(parameters, link, options), RunView(learner)
        self._machine, self._shell = view, shell
        self._seat = FollowerSeat(shell, view, self._preemption, link)

    # ------------------------------------------------------------ what a framework may add

    def _model_joined(self) -> None:
        """The model holds the run's parameters; nothing is trained yet."""

    def _read_loss(self, loss: SupportsFloat | None) -> float:
        """A loss as a number, NaN if there is none. Where that would wait for a device, an older one."""
        return math.nan if loss is None else float(loss)

    def _look_at_model(self, *, last: bool = False) -> str:
        """At a step boundary: what the user should know of the model, once; else nothing."""
        return ""

    # ------------------------------------------------------------ joining

    def __enter__(self) -> Self:
        return self.start()

    def start(self) -> Self:
        """Join the run: returns when the model holds the run's published parameters."""
        if self._state != "new":
            raise LocalProtocolError("this Learner was started before; make a new one")
        self._state = "running"
        self.events.emit(events.LearnerStarted(self._machine.learner, os.getpid(), self._place.site))
        began_ns = time.perf_counter_ns()
        if self._doctor is not None:
            self._doctor.start()
        try:
            kernels.warm_up(merge=False)  # compiled before there is a link, whose thread a compilation would starve
            if self._inner.look() and isinstance(self._shell, LearnerShell):
                self._shell.apply(fx.InnerMissing())
            self._shell.start()
            atexit.register(self._shell.stop, 2.0)  # a script that ends without `close` must not die in a thread's way
            self._seat.join(self._doctor, self._place.address, self._join_timeout_s)
            rung = self._recover()
            self._model_joined()
        except BaseException:
            self._state = "closed"
            self._shell.stop(1.0)
            atexit.unregister(self._shell.stop)
            self.events.close()
            raise
        finally:
            if self._doctor is not None:
                self._doctor.stop()
        wait_ns = time.perf_counter_ns() - began_ns
        self.events.emit(
            events.LearnerJoined(self._machine.learner, self._machine.generation, self._machine.step, wait_ns)
        )
        place = (self._machine.learner, self._machine.generation, self._machine.step)
        self.events.emit(events.LearnerRecovered(*place, rung, self._inner.detail, wait_ns))
        self._resumed = self._inner.trained_before or (self._machine.step > 0 and self._machine.generation > 1)
        self._inner.begin()
        if self._preemption is not None:
            self._preemption.arm()
        self._meter.resume()
        return self

    def _recover(self) -> str:
        """Find this process's inner state on the best rung there is; returns its name."""
        if self._link is None:
            return recover(self._inner, cast(LearnerShell, self._shell))
        return self._recover_together(self._link)

    def _recover_together(self, link: RankLink) -> str:
        """All ranks continue from checkpoints of one step, or none does."""
        return "fresh" if self._machine.step == 0 else "parameters"

    # ------------------------------------------------------------ training

    def step(self, tokens: SupportsIndex, loss: SupportsFloat | None = None) -> None:
        """Tell Atoll that one optimizer step is done. `tokens` is what this learner processed for it, as any whole
        number (numpy's and torch's too); `loss` is only reported. Published updates that have arrived are adopted here,
        between two steps."""
        tokens = count_tokens(tokens)
        if self._state != "running":
            raise LocalProtocolError("step was called outside of the `with atoll.Learner(...)` block")
        step_ns = self._meter.enter()
        value = self._read_loss(loss)
        shell = self._shell
        adopt_ns, snapshot_ns = shell.arrays.adopt_ns, shell.arrays.snapshot_ns
        counted, stall_ns = self._seat.step(tokens, step_ns, value)
        if shell.healing and not self._reseeding:
            shell.healing = False
            self._inner.heal()
        for source in shell.data_sources():
            source.stepped()
        self._warn(self._look_at_model())
        capture_ns = self._inner.stepped(self._seat.capture_now)
        self._meter.leave(
            tokens=counted,
            loss=value,
            stall_ns=stall_ns,
            adopt_ns=shell.arrays.adopt_ns - adopt_ns,
            snapshot_ns=shell.arrays.snapshot_ns - snapshot_ns + capture_ns,
        )
        if reason := self._seat.told_to_leave:
            self.close(reason=reason)
            raise SystemExit(0 if self.handed_over else EXIT_NOT_HANDED_OVER)

    @property
    def _reseeding(self) -> bool:
        return isinstance(self._machine, LearnerMachine) and self._machine.reseeding

    def _warn(self, text: str) -> None:
        """Tell whoever watches the run, and whoever watches this script. Nothing to say: nothing said."""
        if text:
            self.events.emit(events.Warned(self._machine.learner, text))
            warnings.warn(f"atoll: {text}", stacklevel=3)

    # ------------------------------------------------------------ what the loop may ask

    @property
    def done(self) -> bool:
        """True when the run's token budget is spent: leave the loop. Raises what ended this session for good."""
        if self._state == "running":
            self._seat.raise_failure()
        return self._seat.done

    def keep(self, name: str, extra: Stateful) -> None:
        """Add something made after joining (a schedule, a loader's position) to this learner's checkpoints; its state
        is put back now if this process continues from one."""
        self._inner.keep(name, extra)

    def attach_data(self, source: AttachedData) -> None:
        """For `atoll.data`: a reader of leased chunks."""
        self._shell.attach_data(source)

    def poke_data(self, source: AttachedData) -> None:
        """For `atoll.data`: the source has something to report."""
        self._shell.poke_data(source.stream)

    @property
    def step_count(self) -> int:
        """This learner's place in the run, for learning-rate schedules: its own steps, counted from where the run was
        when it joined."""
        return self._machine.step

    @property
    def start_step(self) -> int:
        """The step at which this process joined."""
        return self._machine.step - self._machine.steps

    @property
    def learner_id(self) -> str:
        return self._machine.learner

    @property
    def rank(self) -> int:
        """This learner's number, which no other one of the run has: to choose its part of the data, its seed, or the
        name of a file of its own. ATOLL_RANK if given, else what the syncer says: the number that the id ends with
        (learner-3), or the next that is free. The same id gets the same one again. Known once the run is joined."""
        if self._place.rank is not None:
            return self._place.rank
        if not self._machine.joined:
            raise LocalProtocolError("the syncer gives the rank: ask for it after joining, or set ATOLL_RANK")
        if self._machine.rank >= 0:
            return self._machine.rank
        expected = self._machine.config.learners_expected  # an older syncer gives none
        return next((number for number in numbers(self.learner_id) if number < expected), 0)

    @property
    def world(self) -> int:
        """Into how many parts to divide the data: ATOLL_WORLD if given, else the learners that the run expects; never
        so few that `rank` would be outside."""
        return max(self._place.world or self._machine.config.learners_expected, self.rank + 1)

    @property
    def island_rank(self) -> int:
        """Which process of its learner this is: 0 to island_size - 1. Rank 0 speaks with the syncer."""
        return self._link.rank if self._link is not None else 0

    @property
    def island_size(self) -> int:
        """How many processes this learner has: 1, or the ranks of an island, which share its data among them."""
        return self._link.size if self._link is not None else 1

    @property
    def generation(self) -> int:
        """1 for the first process that joined under this id, 2 for the next."""
        return self._machine.generation

    @property
    def config(self) -> SyncConfig:
        """The run's settings, as the syncer gave them."""
        return self._machine.config

    @property
    def tokens_seen_run(self) -> int:
        """An estimate of the tokens that the whole run has processed: this learner's own, times everybody."""
        if self._machine.steps == 0:
            return 0
        per_step = self._machine.tokens / self._machine.steps
        return int(per_step * self._machine.step * self._machine.config.learners_expected)

    def versions(self) -> tuple[int, ...]:
        """The version of each fragment that this learner has adopted."""
        with self._shell.changed:
            return self._machine.bases

    @contextmanager
    def global_params(self) -> Iterator[None]:
        """Swap the published parameters into the model, for evaluation and saving; swap back on exit. Evaluate these,
        not a replica. Do not call `step` inside."""
        vault, parameters = self._shell.vault, self._parameters
        if self._state != "running" or vault is None:
            raise LocalProtocolError("global_params needs a learner that has joined a run")
        saved = parameters.save()
        try:
            self._shell.arrays.show_published()
            yield
        finally:
            parameters.restore(saved)
            self._meter.resume()

    # ------------------------------------------------------------ leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            self.end_accordingly()
        else:
            self.close(flush=False, reason=f"{kind.__name__}: {error}"[:200])

    def end_accordingly(self) -> None:
        """This process ends with status 4 (EXIT_NOT_HANDED_OVER) if this learner has left and could not hand over, and
        with 1 if it has trained nothing; after whatever the script still does. A `with` block says so by itself."""
        if not self.handed_over:
            exit_status.end_with(EXIT_NOT_HANDED_OVER)
        elif self._idle:
            exit_status.end_with(EXIT_IDLE)

    def close(self, *, flush: bool = True, reason: str = "finished") -> None:
        """Leave the run. With `flush`, progress that was not contributed yet is handed over first, for as long as
        something moves and for ATOLL_LEAVE_S seconds (180) at most; after SIGTERM for ATOLL_SIGTERM_S (20).
        `handed_over` says whether that succeeded, and `end_accordingly` makes it the process's exit status."""
        if self._state != "running":
            return
        self._state = "closed"
        self._meter.tell()
        if text := self._look_at_model(last=True):
            self._say(text)
        shell = self._shell
        for source in shell.data_sources():
            if shell.failure is None and flush:
                source.leaving()
                shell.poke_data(source.stream)
            else:
                source.dropped()  # progress that is thrown away was not trained: its chunks are issued again
        now_s, place = time.monotonic(), self._place
        deadline = LeaveDeadline(self._machine.learner, now_s, leave_s=place.leave_s, sigterm_s=place.sigterm_s)
        self._unhanded_tokens, why = self._seat.hand_over(self._place.address, deadline, flush=flush, reason=reason)
        checkpoint = self._inner.close(last=shell.failure is None)
        if why:
            self._say(sentence(self._machine.learner, self._unhanded_tokens, why, checkpoint))
        self._idle = flush and reason == "finished" and self._never_stepped
        if self._idle:
            self._say(NEVER_STEPPED)
        shell.stop(STOP_S)
        atexit.unregister(shell.stop)
        if self._preemption is not None:
            self._preemption.disarm()  # not before: a SIGTERM meanwhile would cut short what it asks for
        done = (self._machine.learner, self._machine.steps, self._machine.tokens, reason)
        self.events.emit(events.LearnerFinished(*done, unhanded=self._unhanded_tokens))
        self.events.close()

    @property
    def closed(self) -> bool:
        """True once this learner has left, or could not join."""
        return self._state == "closed"

    @property
    def handed_over(self) -> bool:
        """False once `close` has ended without the syncer's word that what this learner trained is safe with it."""
        return self._unhanded_tokens == 0

    @property
    def _never_stepped(self) -> bool:
        """True if this process trained nothing although it could have: the run was not over, nobody told it to leave,
        and it did not come back to find that its work was done already."""
        told = self._seat.done or (self._preemption is not None and self._preemption.requested)
        return not (self._machine.steps or told or self._resumed or self._shell.failure is not None)

    def _say(self, text: str) -> None:
        """For whoever watches the run, and for whoever reads what this process printed."""
        self.events.emit(events.Warned(self._machine.learner, text))
        print(f"atoll: {text}", file=sys.stderr, flush=True)
