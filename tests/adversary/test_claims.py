"""A learner with the token lies in what it says. Honest ones beside it train on, and nothing ends the syncer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import SyncerProcess, TrainingThread, check_books, kill_leftovers
from raw_learner import RawLearner

from atoll.core import TensorSpec
from atoll.core import messages as m
from atoll.errors import RefusedError
from atoll.observe import read_events

MODEL = (
    TensorSpec("0.weight", (32, 32), "float32"),
    TensorSpec("0.bias", (32,), "float32"),
    TensorSpec("2.weight", (32, 32), "float32"),
    TensorSpec("2.bias", (32,), "float32"),
)
"""That of `cluster.small_model`."""


class Run:
    """Two honest learners, training, and as many liars as a test likes."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self.syncer = SyncerProcess(folder, "--fragments", "2", "--sync-every", "4", "--learners", "2", *options)
        self.honest = [TrainingThread(self.syncer.address, name, seed=i) for i, name in enumerate(("one", "other"))]
        self.raw: list[RawLearner] = []
        self.syncer.wait_for(lambda status: min(status["versions"], default=0) >= 2, "the run goes well")

    def liar(self, name: str = "liar") -> RawLearner:
        self.raw.append(RawLearner(self.syncer.address, name, tensors=MODEL))
        return self.raw[-1]

    def goes_on(self) -> dict[str, object]:
        """Both honest learners step, and the run makes versions."""
        before = self.syncer.status()["versions"]
        for learner in self.honest:
            learner.wait_steps(20)
        return self.syncer.wait_for(
            lambda status: min(status["versions"]) >= max(before) + 3, "versions while somebody lies"
        )

    def send_liars_away(self) -> None:
        """Whatever they did, the books add up."""
        for learner in self.raw:
            learner.close()
        self.raw = []
        assert all(trainer.error is None for trainer in self.honest)
        check_books(self.syncer.status())

    def end(self) -> None:
        self.send_liars_away()
        for trainer in self.honest:
            trainer.stop()
            assert trainer.error is None
        check_books(self.syncer.status())
        assert self.syncer.stop() == 0
        assert list(read_events(self.folder)), "what was written down can be read"


@pytest.fixture(scope="module")
def lied_to(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """One run for all of these lies: what one of them left behind must not help the next, either."""
    made = Run(tmp_path_factory.mktemp("lied-to"))
    try:
        yield made
        made.end()
    finally:
        kill_leftovers()


@pytest.fixture(autouse=True)
def no_process_stays() -> None:
    """Here some do, until the last test: in place of the fixture of all tests."""


@pytest.fixture
def run(lied_to: Run) -> Iterator[Run]:
    yield lied_to
    lied_to.send_liars_away()


def test_what_a_learner_says_neither_steers_a_terminal_nor_looks_like_our_own_words(run: Run) -> None:
    """The first one here: of many who come and go, as below, not every line is told."""
    liar = run.liar("evil").join()
    liar.say(m.Leave("bye \x1b[2J\x1b]0;owned\x07\nsyncer warns: all is well\r"))
    run.syncer.wait_for(lambda _: "evil has left" in run.syncer.output(), "what it said is told")
    told = run.syncer.output()
    assert "\x1b" not in told and "\x07" not in told
    (line,) = [line for line in told.splitlines() if "all is well" in line]
    assert "evil has left: bye" in line, "on the line that says who said it"


def test_an_epoch_out_of_the_future_ends_no_syncer(run: Run) -> None:
    status = run.syncer.status()
    for index in range(20):
        with pytest.raises(RefusedError) as refused:
            run.liar(f"liar{index}").hello(run=status["run"], epoch=2**61, generation=1, bases=(1, 1), checksums=(1, 1))
        assert refused.value.code == m.Refusal.STALE_EPOCH
    assert run.goes_on()["epoch"] == status["epoch"]


def test_steps_and_tokens_without_end_neither_stop_the_clock_nor_break_the_books(run: Run) -> None:
    liar = run.liar().join()
    liar.progress(10**9, tokens=1000, step_ns=1)
    assert liar.contribute(0, steps=10**11, tokens=10**14).code in ("", m.Refusal.COUNTERS)
    run.goes_on()
    liar.progress(1, tokens=2**61)
    assert "counters" in liar.wait_ended()
    run.goes_on()


@pytest.mark.parametrize("step", [2**61, 10**9])
def test_a_newcomer_that_is_ready_at_a_step_of_its_own_is_refused(run: Run, step: int) -> None:
    assert "said ready at" in run.liar().join(step=step).wait_ended()
    run.goes_on()


def test_many_ids_that_never_answer_stop_no_round(run: Run) -> None:
    for index in range(20):
        run.liar(f"x{index}").join().progress(1)
    run.goes_on()


def test_data_that_was_leased_to_another_stays_with_it(run: Run) -> None:
    one, liar = run.liar("reader").join(), run.liar().join()
    one.say(m.DataReport("books", 1, 100, 3))
    leased = one.wait(m.DataLeases).granted
    assert len(leased) == 3
    liar.say(m.DataReport("books", 1, 100, 0, done=(0, 50), holding=(1,), returned=(m.Lease(2, 9),)))
    assert liar.wait(m.DataLeases).revoked == (1,)
    one.say(m.DataReport("books", 2, 100, 0, holding=(0, 1, 2)))
    assert one.wait(m.DataLeases, lambda answer: answer.serial == 2).revoked == ()
    assert run.syncer.status()["data"]["books"]["done"] == 0


def test_a_flood_of_reports_and_losses_that_are_no_numbers_stop_nobody(run: Run) -> None:
    liar = run.liar().join()
    for loss in (math.nan, math.inf, -1e308):
        liar.progress(loss=loss)
    for _ in range(5_000):
        liar.progress()
    run.goes_on()
    json.dumps(run.syncer.status(), allow_nan=False)


def test_the_budget_is_not_spent_by_one_claim(tmp_path: Path) -> None:
    run = Run(tmp_path, "--tokens-budget", "100000000")
    liar = run.liar().join()
    liar.progress(10, tokens=10**12)
    run.goes_on()
    assert run.syncer.status()["tokens_processed"] > 10**12 and not run.syncer.status()["stopping"]
    run.end()
