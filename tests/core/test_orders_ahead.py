"""A learner of several processes does at each boundary what was fixed at the one before, and nothing else."""

from __future__ import annotations

import pytest
from world import TENSORS, FakeLearner, World, config

from atoll.core import effects as fx
from atoll.core.learner_machine import LearnerMachine
from atoll.core.messages import NO_VERSION, Fate, Refusal, Reseed
from atoll.core.orders_ahead import BoundaryOrders


class Island:
    """Steps a learner whose orders are fixed ahead, as the rank that speaks does; everything is ready at once."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        machine = LearnerMachine(name, f"{name}-1", TENSORS, orders_ahead=True)
        self.learner: FakeLearner = world._new(machine)
        self.machine = machine
        self.told: list[BoundaryOrders] = []
        world.connect(self.learner)

    def fix(self, *, standing: bool) -> BoundaryOrders:
        self.told.append(self.machine.fix_orders(lambda adopt: True, standing=standing))
        return self.told[-1]

    def stand(self) -> None:
        self.fix(standing=True)
        self.learner.driver.handle(fx.Boundary())
        self.world.run()

    def join(self) -> None:
        for _ in range(20):
            self.world.run()
            if self.machine.joined:
                break
            self.stand()
        assert self.machine.joined
        self.fix(standing=False)

    def step(self, tokens: int = 8) -> list[fx.LearnerEffect]:
        for fragment in self.learner.theta:
            self.learner.theta[fragment] += 1.0
        done: list[fx.LearnerEffect] = []
        ordered = self.told[-1]
        take, adopt = self.learner.driver._host.arrays.take, self.learner.driver._host.arrays.adopt
        host = self.learner.driver._host.arrays
        host.take = lambda fragment: (done.append(fx.TakeSnapshot(fragment)), take(fragment))[1]  # type: ignore[method-assign]
        host.adopt = lambda effect: (done.append(effect), adopt(effect))[1]  # type: ignore[method-assign]
        self.learner.driver.handle(fx.Stepped(tokens, 1_000_000, 0.5))
        host.take, host.adopt = take, adopt  # type: ignore[method-assign]
        assert {e.fragment for e in done if isinstance(e, fx.TakeSnapshot)} == {*ordered.takes, *ordered.given}
        assert tuple(e for e in done if isinstance(e, fx.Adopt)) == ordered.adopts
        self.fix(standing=False)
        self.world.advance(1_000_000)
        self.world.run()
        return done

    def leave(self) -> None:
        self.learner.driver.handle(fx.Boundary())
        self.learner.driver.handle(fx.Closing(True, "finished"))
        for _ in range(50):
            self.world.run()
            if self.learner.left:
                return
            self.stand()
        raise AssertionError("it never left")


def check_ledger(world: World) -> None:
    for fragment in range(world.config.fragments):
        line = world.syncer.ledger.fragment_totals(fragment)
        assert line.processed == line.merged + line.pending + sum(line.discarded.values())


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "mix:0.5"])
def test_everything_trained_is_merged_and_only_orders_touch_the_parameters(adopt: str) -> None:
    world = World(config(adopt=adopt, learners_expected=1))
    island = Island(world, "l0")
    island.join()
    done = [effect for _ in range(60) for effect in island.step()]
    assert any(isinstance(effect, fx.Adopt) for effect in done)
    island.leave()
    world.run()
    check_ledger(world)
    stats = world.syncer.stats()
    assert stats["tokens_processed"] == 60 * 8
    assert stats["tokens_pending"] == 0
    if adopt == "rebase":
        assert stats["tokens_merged"] == 60 * 8 and not any(stats["tokens_discarded"].values())
        assert all(theta == pytest.approx(60.0) for theta in world.theta.values())


def ordered_adopt(island: Island) -> fx.Adopt:
    for _ in range(60):
        if island.told[-1].adopts:
            return island.told[-1].adopts[0]
        island.step()
    raise AssertionError("nothing was to be adopted")


def test_a_reseed_waits_until_what_was_ordered_is_done() -> None:
    world = World(config(learners_expected=1))
    island = Island(world, "l0")
    island.join()
    adopt = ordered_adopt(island)
    island.learner.driver.heard(Reseed("a test"))
    assert not island.machine.reseeding
    assert adopt in island.step()
    assert island.machine.reseeding


def test_word_of_a_contribution_that_an_order_counts_on_waits() -> None:
    world = World(config(learners_expected=1))
    island = Island(world, "l0")
    island.join()
    adopt = ordered_adopt(island)
    while not adopt.already_merged:
        island.step()
        adopt = ordered_adopt(island)
    seq = adopt.already_merged[0]
    island.learner.driver.heard(Fate(adopt.fragment, seq, NO_VERSION, Refusal.STALE_BASE))
    assert adopt in island.step()
    check_ledger(world)


def test_what_a_session_said_is_forgotten_with_it() -> None:
    world = World(config(learners_expected=1))
    island = Island(world, "l0")
    island.join()
    ordered_adopt(island)
    island.learner.driver.heard(Reseed("a test"))
    island.learner.driver.link_down("cut", let_go=False)
    island.step()
    assert not island.machine.reseeding


def test_tokens_of_other_ranks_are_counted_for_all_fragments_or_none() -> None:
    world = World(config(learners_expected=1))
    island = Island(world, "l0")
    island.join()
    island.learner.driver.handle(fx.Stepped(10, 1_000_000, 0.5))
    before = island.machine.tokens
    island.machine.correct_tokens(-100)
    assert island.machine.tokens == before
    island.machine.correct_tokens(5)
    assert island.machine.tokens == before + 5 and set(island.machine.pending_tokens) == {before + 5}
