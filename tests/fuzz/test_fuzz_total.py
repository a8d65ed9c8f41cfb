"""How many cases the default run comes to: 10^5 is what the project promises (RELIABILITY, row 7)."""

from __future__ import annotations

from fuzz_corpus import ROOMS, targets
from fuzz_machines import INPUTS_MIN
from test_fuzz_flips import FLIPS

CASES_MIN = 100_000


def test_the_default_run_has_at_least_a_hundred_thousand_cases() -> None:
    parsed = sum(target.cases for target in targets().values())
    assert parsed + sum(FLIPS.values()) + sum(INPUTS_MIN.values()) >= CASES_MIN


def test_every_parser_is_in_a_test_file() -> None:
    beginnings = tuple(beginning for names in ROOMS.values() for beginning in names)
    assert [name for name in targets() if not name.startswith(beginnings)] == []
