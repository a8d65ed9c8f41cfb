"""Settings: what one dial derives, who wins, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.core.config import SyncConfig
from atoll.errors import ConfigError
from atoll.launch.config import describe, resolved, run_config, script_config, train_config
from atoll.launch.folder import RunFolder
from atoll.launch.options import read_config_file, sync_config, sync_options


def test_learners_is_the_one_dial() -> None:
    config, notes = train_config({"learners": 6, "steps": 10, "batch": 2, "seq": 32})
    assert notes == []
    assert config.method == "decoupled"
    assert config.sync.learners_expected == 6
    assert config.tokens_budget == config.sync.tokens_budget == 6 * 10 * 2 * 32
    text = "\n".join(describe(config))
    assert "quorum 50% = 3 of 6" in text
    assert "3,840 tokens" in text


def test_an_option_reaches_the_sync_config_under_its_name() -> None:
    config, _ = train_config({"learners": 4, "quorum": 3, "grace_cap": 2, "codec_up": "bf16", "overlap": 5})
    assert config.sync.quorum == "3"
    assert config.sync.grace_cap_steps == 2.0
    assert (config.sync.codec_up, config.sync.overlap) == ("bf16", 5)


def test_diloco_is_the_synchronous_special_case() -> None:
    config, _ = train_config({"method": "diloco"})
    assert (config.sync.quorum, config.sync.grace_cap_steps) == ("all", 0.0)
    assert (config.sync.overlap, config.sync.fragments) == (0, 1)
    assert config.sync.synchronous


def test_diloco_keeps_its_definition_and_says_what_it_did_not_use() -> None:
    config, notes = train_config({"method": "diloco", "quorum": "50%", "fragments": 4})
    assert config.sync.quorum == "all"
    assert config.sync.fragments == 4
    assert any("quorum" in note for note in notes)


def test_single_takes_the_steps_of_all_learners_in_one_process() -> None:
    config, _ = train_config({"method": "single", "learners": 4, "steps": 30, "quorum": "9"})
    assert (config.processes, config.steps_per_process) == (1, 120)
    assert config.processes * config.steps_per_process * config.batch * config.seq == config.tokens_budget


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"learners": 2, "quorum": "3"}, r"quorum 3 is above the 2 learners.*use --quorum"),
        ({"method": "diloco", "learners": 2, "quorum": "3"}, "quorum 3 is above"),
        ({"method": "magic"}, "method must be one of decoupled, diloco, dp, single"),
        ({"codec_up": "int3"}, "codec_up is 'int3', which is no codec"),
        ({"merge": "median"}, "merge is 'median', which is no merge method"),
        ({"weights": "luck"}, "weights must be one of"),
        ({"adopt": "mix:2"}, "adopt must be rebase, overwrite or mix:ALPHA"),
        ({"quorum": "most"}, "quorum must be a number"),
        ({"model": "gigantic"}, "model must be one of"),
        ({"optimizer": "magic"}, "optimizer must be one of"),
        ({"device": "toaster"}, "device must be one of"),
        ({"learners": 0}, "learners must be a whole number from 1"),
        ({"steps": -1}, "steps must be"),
        ({"lr": float("nan")}, "lr must be"),
        ({"steps": 1.5}, "setting steps must be int"),
        ({"learners": True}, "setting learners must be int"),
        ({"fragments": "many"}, "setting fragments must be int"),
        ({"sync_evry": 3}, r"unknown setting 'sync_evry' in the settings; did you mean sync_every\? known .*overlap"),
        ({"tokens_budget": 3}, "unknown setting 'tokens_budget'"),
    ],
)
def test_what_cannot_work_is_refused_with_the_choices(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train_config(values)


def test_a_file_may_use_dashes_and_its_unknown_names_are_errors_that_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('learners = 3\nsync-every = 12\nquorum = 2\ncorpus = "stdlib"\nouter-lr = 1\n')
    config, _ = train_config(read_config_file(path))
    assert (config.learners, config.sync.sync_every, config.sync.quorum, config.sync.outer_lr) == (3, 12, "2", 1.0)
    path.write_text("learner = 3\n")
    with pytest.raises(ConfigError, match=r"unknown setting 'learner' in .*run.toml"):
        train_config(read_config_file(path), where=str(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [("bad.toml", "learners = = 3", "not valid TOML"), ("bad.json", "[1]", "one table"), ("bad.json", "{", "JSON")],
)
def test_a_file_that_is_no_settings_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        read_config_file(tmp_path / "missing.toml")


@pytest.mark.parametrize("method", ["decoupled", "diloco", "dp", "single"])
def test_the_written_config_gives_the_same_run_again(tmp_path: Path, method: str) -> None:
    values = {"method": method, "learners": 3, "corpus": 'a "strange" földer', "outer_lr": 0.25, "seed": 7}
    config, _ = train_config(values)
    folder = RunFolder(tmp_path)
    folder.write_config(config.options(), resolved(config))
    again, notes = train_config(read_config_file(tmp_path / "config.toml"))
    assert again == config
    assert notes == []


def test_sync_options_and_sync_config_are_inverse() -> None:
    config = SyncConfig(quorum="2", learners_expected=4, grace_cap_steps=0.5, tokens_budget=9, adopt="mix:0.25")
    assert sync_config(sync_options(config), learners=4, tokens_budget=9) == config


def test_the_settings_of_the_outer_step_are_options_like_the_others(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(
        'feedback-up = false\nfeedback_down = false\ncorrection = "heloco"\nouter-schedule = "cosine"\n'
        'momentum-restart = 8\ncodec_up = "int2"\npartial = "full"\n'
    )
    config, _ = train_config(read_config_file(path))
    sync = config.sync
    assert (sync.feedback_up, sync.feedback_down, sync.correction) == (False, False, "heloco")
    assert (sync.outer_schedule, sync.momentum_restart, sync.codec_up) == ("cosine", 8, "int2")
    assert sync.partial == "full"
    text = "\n".join(describe(config))
    assert "contributions int2 (no feedback), updates int4 (no feedback); merge half-rda with heloco" in text
    assert (
        "outer lr 0.7 (cosine to a tenth), momentum 0.3 (anew every 8 versions), whole steps for partial merges" in text
    )
    RunFolder(tmp_path).write_config(config.options(), resolved(config))
    assert train_config(read_config_file(tmp_path / "config.toml"))[0] == config


def test_a_schedule_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="no budget of them"):
        run_config({"outer_schedule": "linear"})


def test_run_takes_a_method_a_budget_and_minutes(tmp_path: Path) -> None:
    config, notes = script_config({"method": "diloco", "tokens_budget": 5000, "minutes": 2, "grace_cap": 3.0})
    assert (config.sync.quorum, config.sync.overlap, config.sync.fragments) == ("all", 0, 1)
    assert (config.sync.tokens_budget, config.minutes) == (5000, 2.0)
    assert notes == ["method diloco means grace_cap 0.0: 3.0 is not used"]
    assert any("5,000 tokens or 2 minutes" in line for line in describe(config))
    RunFolder(tmp_path).write_config(config.options(), resolved(config))
    assert run_config(read_config_file(tmp_path / "config.toml")) == config


@pytest.mark.parametrize(("method", "remedy"), [("dp", "torchrun"), ("single", "alone")])
def test_methods_that_a_script_does_by_itself_are_refused_with_what_to_do(method: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){remedy}.*atoll train --method {method}"):
        run_config({"method": method})


def test_run_takes_sync_options_and_no_budget() -> None:
    config = run_config({"learners": 4, "quorum": "all", "sync_every": 8})
    assert (config.sync.quorum, config.sync.learners_expected, config.sync.tokens_budget) == ("all", 4, 0)
    with pytest.raises(ConfigError, match="unknown setting 'steps'"):
        run_config({"steps": 3})
