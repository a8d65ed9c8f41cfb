"""The simulator's world with real training in it: a step takes its time there, and happens on the device here."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import TYPE_CHECKING, Protocol, cast

from atoll.core import Layout, SyncConfig, TensorSpec
from atoll.core import effects as fx
from atoll.instruments.lab.payloads import U8, LabLearner, LabSyncer, SharedVersions
from atoll.instruments.lab.replica import Replica
from atoll.instruments.lab.sent import BytesSent
from atoll.instruments.sim import LearnerHost, LearnerPayloads, LearnerSpec, Scenario, SyncerPayloads, World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CHECKPOINT_NS = 60_000_000_000
"""Between two checkpoints of the optimizer's state, as in `learner`."""


class Training(Protocol):
    """What the world asks of the run."""

    threads: Executor
    """Who encodes and stages."""

    def replica(self, name: str) -> Replica: ...
    def lr(self, step: int) -> float: ...
    def beginning(self) -> None: ...
    def stepped(self, name: str, tokens: int) -> None: ...


class LabHost(LearnerHost):
    """One process of a learner. The device computes a step while its virtual time passes."""

    _saved_ns = 0

    @property
    def training(self) -> Training:
        return cast(LabWorld, self.world).training

    def _train(self) -> None:
        self._recover_inner()
        self._saved_ns = self.world.now_ns
        super()._train()

    def _recover_inner(self) -> None:
        """The rungs of `learner`: its own checkpoint, else a peer's state, else none."""
        replica = self.training.replica(self.name)
        if replica.restore_inner():
            return
        replica.forget_inner()
        peers = [host for host in self.world.learners.values() if host.trains and not host.dead and host is not self]
        if self.machine.step > 0 and peers:
            ahead = max(peers, key=lambda host: (host.machine.step, host.name))
            replica.take_inner(self.training.replica(ahead.name))

    def _begin_step(self) -> None:
        replica = self.training.replica(self.name)
        if self.world.now_ns - self._saved_ns >= CHECKPOINT_NS:
            replica.save_inner()
            self._saved_ns = self.world.now_ns
        self.training.beginning()
        replica.launch(self.training.lr(self.machine.step))
        super()._begin_step()

    def _end_step(self, took_ns: int) -> None:
        super()._end_step(took_ns)
        self.training.stepped(self.name, self.spec.tokens)


class LabWorld(World):
    learner_host = LabHost

    def __init__(
        self,
        scenario: Scenario,
        training: Training,
        tensors: tuple[TensorSpec, ...],
        *,
        guests: Mapping[str, LearnerSpec],
    ) -> None:
        super().__init__(scenario)
        self._guests = guests
        self.training = training
        self.tensors = tensors
        self.tape.wanted = False  # nobody replays a lab run, and its payloads would fill the memory
        self._shared: SharedVersions | None = None
        self.rhos: list[float] = []
        """Cosines of successive merged gradients of a fragment, merge by merge, of all syncers that there were."""
        self.sent = BytesSent()

    def note(self, source: str, note: fx.Note) -> None:
        super().note(source, note)
        self.sent.noted(note.event)

    def record_merge(self, epoch: int, effect: fx.Merge, checksum: int, payloads: Sequence[U8]) -> None:
        super().record_merge(epoch, effect, checksum, payloads)
        syncer = self.lab_syncer()
        if syncer is not None:
            update = syncer.update(effect.fragment, effect.version)
            self.sent.merged(syncer.state.fragments[effect.fragment].theta.size, payloads, update)
            assert self.syncer is not None
            self.sent.steps += sum(item.steps for item in self.syncer.machine.merging(effect.fragment))

    def carried_bytes(self) -> dict[str, int]:
        """What all links have carried, messages included."""
        up, down = map(sum, zip(*(link.bytes for link in self.links.values()), strict=True))
        return {"bytes_up": up, "bytes_down": down}

    def add_learner(self, name: str, spec: LearnerSpec) -> None:
        super().add_learner(name, spec)
        self.links[name].shares = True

    def guest_spec(self, name: str) -> LearnerSpec:
        return self._guests[name]

    def new_syncer_payloads(self, layout: Layout, config: SyncConfig) -> SyncerPayloads:
        self.whole_bytes = 4 * max(fragment.size for fragment in layout.fragments)
        return LabSyncer(layout, config, durable=self.scenario.durability != "none", rhos=self.rhos)

    def new_learner_payloads(self, layout: Layout, config: SyncConfig, learner: str) -> LearnerPayloads:
        if self._shared is None:
            self._shared = SharedVersions(len(layout.fragments))
        return LabLearner(
            layout,
            config,
            self.training.replica(learner),
            shared=self._shared,
            threads=self.training.threads,
            plan_adopt=self.learners[learner].machine.plan_adopt,
            look=self._look,
        )

    def _look(self, fragment: int, payload: U8, codec: str) -> None:
        syncer = self.lab_syncer()
        if syncer is not None:
            syncer.look(fragment, payload, codec)

    def lab_syncer(self) -> LabSyncer | None:
        """The syncer's arrays, once there are any."""
        syncer = self.syncer  # threads ask, too, and it may be killed meanwhile
        payloads = syncer.payloads if syncer is not None else None
        if not isinstance(payloads, LabSyncer) or not payloads.state.fragments:
            return None
        return payloads

    def counts(self) -> Mapping[str, int]:
        """Fates of all contributions' tokens, contributions and rounds, as the syncer's books say."""
        assert self.syncer is not None
        stats = self.syncer.machine.stats()
        return {
            "contributions_merged": stats["contributions_merged"],
            "rounds": sum(self.syncer.machine.versions),
            "tokens_merged": stats["tokens_merged"],
            "tokens_pending": stats["tokens_pending"],
            **{f"tokens_{cause}": tokens for cause, tokens in sorted(stats["tokens_discarded"].items())},
        }
