"""Every bug that the fuzzer has found, as the scenario that showed it.

The scenarios are files, so that each stays what it is when `draw` changes. A change of the protocol may still lead one
past the moment at which its bug showed: then it is a run like any other, and the fuzzer has to find the bug anew. To
add one: `atoll sim run --seed N --save` writes it; put it into `scenarios` as `seed-N.json` and its story into
`STORIES`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.sim.run import run_scenario
from atoll.sim.scenario import load

SCENARIOS = Path(__file__).parent / "scenarios"
STORIES = {
    17: "adopt=overwrite: a learner whose steps take longer than a round had nothing to give whenever it was asked",
    72: "synchronous: after a kill a request reached a learner that stood waiting, and it never answered",
    103: "something huge came in before the norm guard knew any norms; afterwards everybody was refused for ever",
    125: "synchronous, no faults: a request reached a learner that stood waiting without a snapshot; deadlock",
    126: "a syncer that came back with a fragment nobody had woke itself for ever at one moment",
    154: "synchronous: an aborted round moved a due step past the step at which a learner already waited",
    313: "the ledger was balanced with a report that a contribution had overtaken: tokens counted twice",
    336: "versions announced, not fetched and then lost by a rotten slot were waited for, for ever",
    527: "what was merged into versions that were announced, not fetched and then lost was lost as well",
    532: "adopt=overwrite: another slow learner (see 17) that was never merged",
    898: "synchronous: learner and syncer disagreed about a due step after a restart; nothing moved any more",
    975: "a learner that left while its link was down did not deliver its last report",
    1253: "synchronous: a learner waited at another step than the syncer wanted to ask at; nothing moved any more",
    2017: "a seed push that broke while the session lived was never tried again: the run did not begin",
    3019: "the giver of a healed fragment went away while its bytes were being put in place",
    3584: "a seed push that broke off was not repeated, and nobody else was asked for the seed",
    3839: "a column on disk knew that somebody had left, the tape did not: after a kill tokens counted twice",
    5699: "the reply to a refused push was lost: the learner heard 'duplicate' and waited for a fate for ever",
    6906: "a learner that missed a roll-back applied updates of the new line to bits of the old one",
}


@pytest.mark.parametrize("seed", [pytest.param(seed, id=f"{seed}: {story}") for seed, story in STORIES.items()])
def test_what_was_found_stays_fixed(seed: int) -> None:
    report = run_scenario(load(SCENARIOS / f"seed-{seed}.json"))
    assert report.commits > 0
    assert not report.violations, f"{STORIES[seed]}: {report.violations[0]}"


def test_every_scenario_has_its_story() -> None:
    assert {path.name for path in SCENARIOS.glob("*.json")} == {f"seed-{seed}.json" for seed in STORIES}
