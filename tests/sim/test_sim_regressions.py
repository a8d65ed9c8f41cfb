"""Every bug that the fuzzer has found, as the scenario that showed it.

The scenarios are files, so that each stays what it is when `draw` changes. A change of the protocol may still lead one
past the moment at which its bug showed: then it is a run like any other, and the fuzzer has to find the bug anew. To
add one: `atoll sim run --seed N --save` writes it; put it into `scenarios` as `draw-VERSION-seed-N.json` and its story
into `STORIES`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.instruments.sim.run import run_scenario
from atoll.instruments.sim.scenario import load

SCENARIOS = Path(__file__).parent / "scenarios"
STORIES = {
    "seed-17": "adopt=overwrite: a learner whose steps take longer than a round had nothing to give whenever asked",
    "seed-72": "synchronous: after a kill a request reached a learner that stood waiting, and it never answered",
    "seed-103": "something huge came in before the norm guard knew any norms; then everybody was refused for ever",
    "seed-125": "synchronous, no faults: a request reached a learner that stood waiting without a snapshot; deadlock",
    "seed-126": "a syncer that came back with a fragment nobody had woke itself for ever at one moment",
    "seed-154": "synchronous: an aborted round moved a due step past the step at which a learner already waited",
    "seed-313": "the ledger was balanced with a report that a contribution had overtaken: tokens counted twice",
    "seed-336": "versions announced, not fetched and then lost by a rotten slot were waited for, for ever",
    "seed-527": "what was merged into versions that were announced, not fetched and then lost was lost as well",
    "seed-532": "adopt=overwrite: another slow learner (see 17) that was never merged",
    "seed-898": "synchronous: learner and syncer disagreed about a due step after a restart; nothing moved any more",
    "seed-975": "a learner that left while its link was down did not deliver its last report",
    "seed-1253": "synchronous: a learner waited at another step than the syncer wanted to ask at; nothing moved",
    "seed-2017": "a seed push that broke while the session lived was never tried again: the run did not begin",
    "seed-3019": "the giver of a healed fragment went away while its bytes were being put in place",
    "seed-3584": "a seed push that broke off was not repeated, and nobody else was asked for the seed",
    "seed-3839": "a column on disk knew that somebody had left, the tape did not: after a kill tokens counted twice",
    "seed-5699": "the reply to a refused push was lost: the learner heard 'duplicate' and waited for a fate for ever",
    "seed-6906": "a learner that missed a roll-back applied updates of the new line to bits of the old one",
    "draw-2-seed-39": "a syncer that waited for learners lost its fragments again, and woke itself for ever",
    "draw-2-seed-1048": "a learner came back after the run had ended and went again: its last tokens were nobody's",
    "draw-2-seed-169": "the last holder of a lost run left before it had brought all of it back, and nobody was told",
    "draw-3-seed-185": "robust: steps were smaller for one that was left out of every merge it came to",
    "draw-3-seed-1027": "share_max: I14 asked for half of a step where the operator allows for half",
    "draw-3-seed-1887": "a liar's copies of next to nothing had honest contributions refused as too long",
    "draw-3-seed-2158": "one that held what all hold was asked for it, and did not bring it for ten minutes",
    "draw-3-seed-3109": "robust: the run had turned, and everybody was left out by witnesses of the old way",
    "draw-3-seed-1534": "three held version 1, and one learner's made-up 3 became the run's",
    "draw-3-seed-2389": "one learner's made-up version, two beyond those that agreed, became the run's",
    "draw-3-seed-2810": "four held version 4, and one learner's made-up 6 became the run's",
    "draw-3-seed-3326": "what a liar had trained was a version that four others held: it was called a lie",
    "draw-4-seed-100099": "one that agreed with another was frozen: what nobody could tell was called a defect",
    "draw-4-seed-200017": "age_discount 0: steps were small for one that would come late, and then weighed nothing",
    "draw-4-seed-300256": "ids that never answered counted no longer, and the first round waited for them all the same",
    "draw-4-seed-2025": "a claim of 5000 steps for few tokens made the one beside it weigh nothing",
    "draw-4-seed-2577": "the same with 2000 steps, in the third merge of a run",
    "draw-4-seed-2889": "the same while two others had joined and made nothing yet",
    "draw-4-seed-2928": "of three learners one brought next to nothing, and the longer honest one was refused",
    "draw-4-seed-3966": "one of two said that its steps take a nanosecond, and the budget was spent in a second",
    "draw-5-seed-10122": "what a leaver handed over broke on the way, and it left without giving it again",
    "draw-3-seed-3212": "a run without state took one learner's made-up version, beside two that agreed",
    "draw-6-seed-1156": "a primary with --replicate that came back told what its standby had never got",
    "draw-6-seed-3026": "a lost version came to a shard before the word of its learner's new secret, and never again",
    "draw-7-seed-240": "a shard was given up between the layout and the first parameters, and the run never began",
    "draw-7-seed-1402": "a shard wrote what its disk had given back under the name of a newer version",
    "draw-7-seed-2784": "a shard on an empty disk served zeros, and the relay gave them to every newcomer for ever",
    "draw-7-seed-241": "durability none: shards kept to a run that had died with its coordinator",
}
"""By the file's name: the version of `draw`, where it had a number, and the seed."""
UNDECIDABLE = {"draw-4-seed-100099"}
"""Where a liar's version became the run's because no two honest learners were there that agreed."""


@pytest.mark.parametrize("name", [pytest.param(name, id=f"{name}: {story}") for name, story in STORIES.items()])
def test_what_was_found_stays_fixed(name: str) -> None:
    scenario = load(SCENARIOS / f"{name}.json")
    drawn = f"draw-{scenario.draw}-" if scenario.draw else ""
    assert name == f"{drawn}seed-{scenario.seed}"
    report = run_scenario(scenario)
    assert report.commits > 0
    assert not report.violations, f"{STORIES[name]}: {report.violations[0]}"
    assert bool(report.undecidable) == (name in UNDECIDABLE), STORIES[name]


def test_every_scenario_has_its_story() -> None:
    assert {path.name for path in SCENARIOS.glob("*.json")} == {f"{name}.json" for name in STORIES}


def test_a_round_has_a_quorum_as_soon_as_fewer_are_enough() -> None:
    """Here nobody answers it again: two have, and those who never do count no longer after half a minute."""
    assert run_scenario(load(SCENARIOS / "draw-4-seed-300256.json")).commits >= 50, "12 where it waits for its time-out"


def test_a_version_that_was_announced_and_lost_is_not_asked_for_without_a_pause() -> None:
    """The whole fragment came, older than that, and the update was asked for again, as fast as the link let it."""
    assert run_scenario(load(SCENARIOS / "draw-6-seed-3026.json")).events < 60_000, "445,036 without a pause"
