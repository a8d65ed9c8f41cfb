"""Which settings a syncer goes on with when it is started again: those it was given, else those the run had."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.config import SyncConfig
from atoll.core.durable import SETTINGS_KEY
from atoll.errors import ConfigError, StoreError
from atoll.launch.options import sync_fields
from atoll.syncer.recover import settle

BEFORE = SyncConfig(sync_every=24, fragments=12, merge="mean", outer_lr=1.0, learners_expected=4, partial="full")
ROWS = {SETTINGS_KEY: BEFORE.to_dict()}


def test_what_is_not_given_stays_as_it_was() -> None:
    config, said = settle(SyncConfig(outer_lr=0.5), frozenset({"outer_lr"}), ROWS)
    assert config.to_dict() == {**BEFORE.to_dict(), "outer_lr": 0.5}
    assert said == ["settings changed: outer_lr 1.0 -> 0.5"]
    assert settle(SyncConfig(), frozenset(), ROWS) == (BEFORE, [])


def test_settings_that_are_given_whole_win_whole() -> None:
    config, said = settle(SyncConfig(sync_every=6), None, ROWS)
    assert config == SyncConfig(sync_every=6, fragments=12), "a run cannot change its fragments"
    assert "sync_every 24 -> 6" in said[0] and "merge mean -> half-rda" in said[0] and "fragments" not in said[0]


def test_a_run_of_an_older_version_kept_no_settings_and_its_user_hears_it() -> None:
    config, said = settle(SyncConfig(sync_every=6), frozenset({"sync_every"}), {})
    assert config == SyncConfig(sync_every=6) and "defaults" in said[0]
    assert settle(SyncConfig(), None, {}) == (SyncConfig(), [])


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="quorum 6 is above"):
        settle(SyncConfig(quorum="6", learners_expected=6), frozenset({"quorum"}), ROWS)


@pytest.mark.parametrize("row", [{"sync_every": "often"}, {"of_the_future": 1}, {"sync_every": -4}, [1], 7, "x"])
def test_settings_that_make_no_sense_are_an_error_with_a_remedy(row: Any) -> None:
    with pytest.raises(StoreError, match="use the version that wrote them"):
        settle(SyncConfig(), frozenset(), {SETTINGS_KEY: row})


def test_the_options_that_were_given_by_the_names_of_their_fields() -> None:
    given = sync_fields(["grace_cap", "learners", "tokens_budget", "quorum", "durability", "record"])
    assert given == {"grace_cap_steps", "learners_expected", "tokens_budget", "quorum"}
