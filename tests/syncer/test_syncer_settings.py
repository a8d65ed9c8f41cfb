"""Which settings a syncer begins and goes on with: those it was given, else those the run had, else the defaults."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from atoll.core.config import SyncConfig
from atoll.core.durable import SETTINGS_KEY
from atoll.errors import ConfigError, StoreError
from atoll.syncer.recover import agree_on_settings

BEFORE = SyncConfig(sync_every=24, fragments=12, merge="mean", outer_lr=1.0, learners_expected=4, correction="heloco")
ROWS = {SETTINGS_KEY: BEFORE.to_dict()}


def test_a_run_that_begins_has_the_defaults_where_nothing_is_given() -> None:
    assert agree_on_settings({"outer_lr": 0.5}, None) == (SyncConfig(outer_lr=0.5), [])
    assert agree_on_settings(SyncConfig(sync_every=5), None) == (SyncConfig(sync_every=5), [])
    with pytest.raises(ConfigError, match="quorum 6 is above the 1 learners"):
        agree_on_settings({"quorum": "6"}, None)


def test_what_is_not_given_stays_as_it_was() -> None:
    config, said = agree_on_settings({"outer_lr": 0.5}, ROWS)
    assert config.to_dict() == {**BEFORE.to_dict(), "outer_lr": 0.5}
    assert said == ["settings changed: outer_lr 1.0 -> 0.5"]
    assert agree_on_settings({}, ROWS) == (BEFORE, [])
    assert agree_on_settings({"fragments": 0}, ROWS) == (BEFORE, [])
    assert agree_on_settings({"quorum": "3"}, ROWS)[0].quorum == "3", "the run has four learners, whatever is usual"


def test_settings_that_are_given_whole_win_whole() -> None:
    config, said = agree_on_settings(SyncConfig(sync_every=6), ROWS)
    assert config == SyncConfig(sync_every=6, fragments=12), "a run cannot change its fragments"
    for part in ("sync_every 24 -> 6", "merge mean -> half-rda", "correction heloco -> none"):
        assert part in said[0]
    assert "fragments" not in said[0]


def test_a_run_of_an_older_version_goes_on_with_its_defaults_and_its_user_hears_it() -> None:
    config, said = agree_on_settings({"sync_every": 6}, {})
    assert (config.sync_every, config.merge, config.outer_lr, config.outer_momentum) == (6, "rda", 0.7, 0.5)
    assert (config.carry_versions_max, config.partial) == (4, "full")
    assert "defaults of 0.3" in said[0]
    assert agree_on_settings(SyncConfig(), {}) == (SyncConfig(), []), "everything is given: nothing was guessed"
    assert agree_on_settings(asdict(SyncConfig()), {}) == (SyncConfig(), [])


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="quorum 6 is above the 4 learners"):
        agree_on_settings({"quorum": "6"}, ROWS)


@pytest.mark.parametrize("row", [{"sync_every": "often"}, {"of_the_future": 1}, {"sync_every": -4}, [1], 7, "x"])
def test_settings_that_make_no_sense_are_an_error_with_a_remedy(row: Any) -> None:
    with pytest.raises(StoreError, match="use the version that wrote them"):
        agree_on_settings({}, {SETTINGS_KEY: row})
