"""Durability settings: times as people write them, and values that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError
from atoll.launch.config import describe, resolved, run_config, train_config
from atoll.launch.durability import (
    DurabilityConfig,
    check_keepable,
    describe_durability,
    duration_text,
    parse_duration,
    parse_options,
)
from atoll.launch.folder import RunFolder
from atoll.launch.options import read_config_file
from atoll.launch.run import run_command
from atoll.launch.train import run_train


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("5m", 300), ("1h", 3600), ("1.5m", 90), (" 2 m ", 120), (".5", 0.5)]
)
def test_times_are_written_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration("snapshot_every", text) == seconds
    assert parse_duration("snapshot_every", duration_text(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "-5", "1d", "5mm", "1e3", "nan"])
def test_other_texts_are_no_times(text: str) -> None:
    with pytest.raises(ConfigError, match="90s, 5m or 1h"):
        parse_duration("snapshot_every", text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"durability": "often"}, "durability must be one of commit, interval, none"),
        ({"durability_interval": "0"}, "durability_interval must be from 0.1 s"),
        ({"snapshot_every": float("inf")}, "snapshot_every must be from"),
        ({"snapshot_every": True}, "setting snapshot_every must be float"),
        ({"keep": 0}, "keep must be"),
        ({"keep": "many"}, "setting keep must be int"),
        ({"snapshot_options": "[1]"}, "one JSON object"),
        ({"snapshot_options": "{"}, "one JSON object"),
        ({"snapshot_options": "[" * 100_000}, "one JSON object"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], message: str) -> None:
    for build in (train_config, run_config):
        with pytest.raises(ConfigError, match=message):
            build(values)


def test_options_of_a_file_system_are_an_object() -> None:
    assert parse_options("") == {}
    assert parse_options('{"endpoint_url": "http://127.0.0.1:9"}') == {"endpoint_url": "http://127.0.0.1:9"}


@pytest.mark.parametrize(
    "settings",
    [
        {"snapshot_options": '{"key": "a", "secret": "b"}'},
        {"snapshot_options": '{"client_kwargs": {"endpoint_url": "http://x", "verify_with": "b"}}'},
        {"snapshot_options": '{"endpoint_url": "http://someone:b@host"}'},
        {"snapshots": "sftp://someone:b@host/run"},
    ],
)
def test_what_may_be_a_credential_is_not_kept_in_a_run_folder(tmp_path: Path, settings: dict[str, str]) -> None:
    config = run_config({**settings, "out": str(tmp_path / "run")})
    with pytest.raises(ConfigError, match="ATOLL_SNAPSHOT_OPTIONS"):
        run_command(config, ["true"])
    with pytest.raises(ConfigError, match="ATOLL_SNAPSHOT_OPTIONS"):
        run_train(train_config({**settings, "out": str(tmp_path / "run")})[0])
    assert not (tmp_path / "run").exists()


def test_other_options_of_a_file_system_are_kept() -> None:
    kept = '{"anon": false, "client_kwargs": {"endpoint_url": "http://host:9/a@b", "region_name": "x"}, "n": [1, 2]}'
    check_keepable(DurabilityConfig(snapshots="s3://bucket/run", snapshot_options=kept))


def test_options_that_cannot_be_read_are_not_shown() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_options('{"secret": "7c1e5b0d44"')
    assert "7c1e5b0d44" not in str(raised.value)


def test_the_settings_are_kept_in_the_run_folder_and_described(tmp_path: Path) -> None:
    values = {"durability": "interval", "durability_interval": "90", "snapshots": "s3://bucket/run", "keep": 5}
    values |= {"snapshot_every": "1h", "snapshot_options": '{"anon": false}'}
    for config in (train_config(values)[0], run_config(values)):
        assert config.durability == DurabilityConfig("interval", 90.0, "s3://bucket/run", 3600.0, 5, '{"anon": false}')
        folder = RunFolder(tmp_path)
        folder.write_config(config.options(), resolved(config))
        again = read_config_file(tmp_path / "config.toml")
        assert (train_config(again)[0] if "steps" in again else run_config(again)) == config
        [line] = [line for line in describe(config) if line.startswith("durability")]
        assert line == (
            "durability interval: state goes to disk every 90s; snapshot every 1h to s3://bucket/run, 5 kept"
        )


def test_the_default_is_every_commit_and_no_snapshots() -> None:
    assert (
        describe_durability(DurabilityConfig()) == "durability commit: every commit is on disk before it is published"
    )
    assert "in memory only" in describe_durability(DurabilityConfig("none"))


def test_methods_without_a_syncer_do_not_speak_of_it() -> None:
    config, _ = train_config({"method": "dp"})
    assert not any("durability" in line for line in describe(config))
