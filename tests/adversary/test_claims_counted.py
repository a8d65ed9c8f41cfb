"""One learner that lies beside raw ones that do not, round by round: what a lie is worth comes out as a number."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import xxhash
from cluster import SyncerProcess, check_books
from guarded import memory_peak
from raw_learner import RawLearner

from atoll.core import Committed, TensorSpec
from atoll.core import messages as m
from atoll.core.contribution_intake import KEPT_PER_LEARNER_MAX
from atoll.core.events import FragmentHealed
from atoll.errors import RefusedError
from atoll.observe import read_events

STEPS, TOKENS = 2, 64
"""Of every contribution that does not lie: 32 tokens a step."""


LARGE_HELLOS_BYTES_MAX = 300_000_000
"""Of four such Hellos, which are parsed one after the other. Of eight that were twice as large 270 MB were measured,
most of it for the one in hand."""


class Rounds:
    """Raw learners in a run of one fragment, whose every round asks all of them."""

    def __init__(self, folder: Path, *options: str, honest: int = 2) -> None:
        names = [f"honest-{number}" for number in range(honest)]
        together = ("--fragments", "1", "--sync-every", str(STEPS), "--quorum", "all")
        self.folder = folder
        self.syncer = SyncerProcess(folder, *together, "--learners", str(honest + 1), *options)
        self.honest = [RawLearner(self.syncer.address, name).join() for name in names]
        self.liar = RawLearner(self.syncer.address, "liar").join()
        self.round = 0

    def go(self, values: float = 0.001, **lies: int) -> list[m.PushReply]:
        """One round. The liar's contribution is of these values; its header, and its report, say what `lies` say."""
        self.round += 1
        for learner in self.honest:
            learner.progress(STEPS)
        self.liar.progress(STEPS, tokens=lies.get("tokens", TOKENS) // STEPS)
        for learner in (*self.honest, self.liar):
            learner.wait(m.Request, lambda request: request.round == self.round)
        replies = [self.liar.contribute(0, values, **{"steps": STEPS, "tokens": TOKENS, **lies})]
        replies += [learner.contribute(0, steps=STEPS, tokens=TOKENS) for learner in self.honest]
        for learner in self.honest:
            learner.wait(m.Published, lambda published: published.version == self.round)
        return replies

    def weights(self) -> list[float]:
        """What the liar weighed in each merge, of a run that has ended: then its events are in their file."""
        self.end()
        merges = [event for *_, event in read_events(self.folder) if isinstance(event, Committed)]
        shares = [dict(zip(merge.contributors, merge.weights, strict=True)).get("liar", 0.0) for merge in merges]
        assert all(sum(merge.weights) == pytest.approx(1.0) for merge in merges if merge.weights)
        return shares[-self.round :]

    def end(self) -> None:
        if self.syncer.process.poll() is not None:
            return
        for learner in (*self.honest, self.liar):
            learner.close()
        check_books(self.syncer.status())
        assert self.syncer.stop() == 0


@pytest.fixture
def rounds(tmp_path: Path) -> Iterator[Rounds]:
    made = Rounds(tmp_path)
    yield made
    made.end()


def test_a_sudden_claim_of_a_hundred_times_the_tokens_weighs_four_times_as_much_and_no_more(rounds: Rounds) -> None:
    rounds.go()
    rounds.go(tokens=100 * TOKENS)
    assert rounds.weights() == pytest.approx([1 / 3, 4 / 6]), "by its claim it would be 0.9998"


def test_with_a_share_of_a_third_a_claim_gains_nothing(tmp_path: Path) -> None:
    rounds = Rounds(tmp_path, "--share-max", "0.34")
    for _ in range(4):
        rounds.go(tokens=1000 * TOKENS)
    assert rounds.weights() == pytest.approx([0.34] * 4)


def test_one_learner_cannot_fill_the_syncer_with_contributions(rounds: Rounds) -> None:
    rounds.liar.progress(60, tokens=1)
    codes = [rounds.liar.contribute(0, steps=1, tokens=1).code for _ in range(60)]
    assert codes == [""] * KEPT_PER_LEARNER_MAX + [m.Refusal.BUSY] * (60 - KEPT_PER_LEARNER_MAX)


@pytest.mark.parametrize(("robust", "weight"), [("off", 0.25), ("cosine", 0.0)])
def test_a_flipped_sign_weighs_nothing_with_robust_and_its_share_without(
    tmp_path: Path, robust: str, weight: float
) -> None:
    rounds = Rounds(tmp_path, "--robust", robust, honest=3)
    for _ in range(3):
        rounds.go(-0.001)
    assert rounds.weights() == pytest.approx([weight] * 3)


@pytest.mark.parametrize("beyond", [2, 2**40])
def test_a_version_of_its_own_does_not_win_after_a_restart(rounds: Rounds, beyond: int) -> None:
    """The parameters that it brings are near the disk's, and it brings them as soon as it is asked."""
    for _ in range(3):
        rounds.go()
    run, forged = rounds.syncer.status()["run"], rounds.liar._full(0, 0.011).tobytes()
    rounds.syncer.kill()
    rounds.syncer.again()
    before = len(rounds.liar.heard)
    back(rounds.liar, run, 3 + beyond, xxhash.xxh3_64_intdigest(forged))
    for learner in rounds.honest:
        back(learner, run, 3, learner.wait(m.Published, lambda told: told.version == 3).checksum)
    told = rounds.liar.heard
    rounds.liar.wait_until(lambda: bool({m.Heal, m.Start} & {type(message) for message in told[before:]}), "what next")
    if any(isinstance(heard, m.Heal) for heard in rounds.liar.heard):
        rounds.liar.push(m.PushKind.HEAL, 0, forged, base_version=3 + beyond, codec=m.WHOLE_CODEC)
    after = rounds.syncer.wait_for(lambda now: now["committed"], "the run goes on")
    assert after["versions"] == [3]
    rounds.end()
    assert not [event for *_, event in read_events(rounds.folder) if isinstance(event, FragmentHealed)]


def back(learner: RawLearner, run: str, version: int, checksum: int) -> None:
    """It was in the run before, and says what it holds."""
    assert learner.welcome is not None
    learner.drop()
    learner.hello(run=run, generation=learner.welcome.generation, bases=(version,), checksums=(checksum,))


def test_ids_that_nobody_has_seen_are_taken_in_only_so_fast(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"ATOLL_PRELOAD": "few_new_ids", "TEST_NEW_IDS": "5,1", "PYTHONPATH": paths}
    syncer = SyncerProcess(tmp_path, "--fragments", "1", **environment)
    known = RawLearner(syncer.address, "known").join()
    made_up = [RawLearner(syncer.address, f"made-up-{number}") for number in range(20)]
    codes = [_hello(learner) for learner in made_up]
    assert codes == [""] * 4 + [m.Refusal.BUSY] * 16
    known.drop()
    assert _hello(known) == "", "whoever was there need not wait"
    assert len(syncer.status()["members"]) == 5
    for learner in (known, *made_up):
        learner.close()
    assert syncer.stop() == 0


def _hello(learner: RawLearner, **lies: Any) -> str:
    """The code by which it is refused; "" if it is taken in."""
    try:
        learner.hello(**lies)
    except RefusedError as error:
        return error.code
    return ""


def test_large_hellos_are_refused_by_name_and_stop_nobody(rounds: Rounds) -> None:
    """Four at a time, each with a list of 100,000 tensors (some 3.5 MB): read two at a time, parsed off the loop."""
    tensors = tuple(TensorSpec(f"layer.{number}.weight", (8, 8), "float32") for number in range(100_000))
    liars = [RawLearner(rounds.syncer.address, f"large-{number}", tensors=tensors) for number in range(4)]
    before = memory_peak(rounds.syncer)
    with ThreadPoolExecutor(len(liars)) as pool:
        answers = [pool.submit(_hello, liar) for liar in liars]
        for _ in range(3):
            rounds.go()
        assert {answer.result() for answer in answers} == {m.Refusal.LAYOUT}
    assert memory_peak(rounds.syncer) - before < LARGE_HELLOS_BYTES_MAX
    for liar in liars:
        liar.close()


def test_an_id_that_no_reader_could_show_is_refused_by_name(rounds: Rounds) -> None:
    for name in ("x" * 65, "caf\u00e9", "two\nlines", ""):
        liar = RawLearner(rounds.syncer.address, name)
        assert _hello(liar) == m.Refusal.BAD_REQUEST, name
        liar.close()
    rounds.go()
