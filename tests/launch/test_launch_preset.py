"""`--preset paper`: the publication's settings under one name, beneath everything that is said explicitly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.core.config import SyncConfig
from atoll.core.presets import SYNC_PRESETS
from atoll.errors import ConfigError
from atoll.launch.config import resolved, run_config, train_config
from atoll.launch.folder import RunFolder
from atoll.launch.options import read_config_file

PAPER = SYNC_PRESETS["paper"]


def names(config: SyncConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in PAPER}


def test_the_preset_is_what_the_publication_says() -> None:
    config = run_config({"learners": 8, "preset": "paper"}).sync
    assert (config.sync_every, config.fragments, config.overlap, config.quorum) == (24, 24, 2, "1")
    assert config.grace_cap_steps > 0
    assert (config.merge, config.weights, config.adopt) == ("rda", "tokens2_per_step", "overwrite")


def test_what_the_preset_does_not_name_stays_as_it_is_without_it() -> None:
    with_it, without = run_config({"preset": "paper"}).sync, run_config({}).sync
    rest = [name for name in SyncConfig.__dataclass_fields__ if name not in PAPER]
    assert {n: getattr(with_it, n) for n in rest} == {n: getattr(without, n) for n in rest}


@pytest.mark.parametrize("make", [run_config, lambda values: train_config(values)[0]])
def test_an_explicit_setting_wins_over_the_preset(make: Any) -> None:
    config = make({"learners": 4, "preset": "paper", "sync_every": 8, "grace_cap": 0.5, "merge": "mean"}).sync
    assert names(config) == {**PAPER, "sync_every": 8, "grace_cap_steps": 0.5, "merge": "mean"}


def test_a_method_keeps_its_own_nature_under_the_preset_and_complains_of_nothing() -> None:
    config, notes = train_config({"method": "diloco", "learners": 4, "preset": "paper"})
    assert config.sync.synchronous and config.sync.fragments == 1 and config.sync.quorum == "all"
    assert (config.sync.sync_every, config.sync.merge) == (24, "rda")
    assert notes == []


@pytest.mark.parametrize("method", ["dp", "single"])
def test_the_preset_does_not_stop_a_comparison_with_one_flag(method: str) -> None:
    assert train_config({"method": method, "preset": "paper"})[0].method == method


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"preset must be one of paper; not 'papre' \(did you mean paper\?\)"):
        run_config({"preset": "papre"})


def test_the_run_folder_names_what_the_preset_stood_for(tmp_path: Path) -> None:
    config = run_config({"learners": 2, "preset": "paper"})
    RunFolder(tmp_path).write_config(config.options(), resolved(config))
    again = read_config_file(tmp_path / "config.toml")
    assert "preset" not in again and run_config(again) == config
