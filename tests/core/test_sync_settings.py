"""Settings that came after the first release: checks, what older peers get to see, and who is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pacing_toy  # noqa: F401
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.admission import check_settings
from atoll.core.config import CORRECTIONS, LATER_SETTINGS, OUTER_SCHEDULES, OUTERS, PARTIALS, SyncConfig
from atoll.core.messages import PROTOCOL_VERSION, Hello, Refusal
from atoll.core.policy import scales_steps, step_share
from atoll.errors import ConfigError
from atoll.wire.versions import SETTINGS_1, settings_in

USED: dict[str, Any] = {
    "feedback_up": False,
    "feedback_down": False,
    "correction": "heloco",
    "outer_schedule": "cosine",
    "momentum_restart": 8,
    "partial": "scaled",
    "pacing": "patient",
    "outer": "toy",
    "sizes": "confirmed",
    "share_max": 0.25,
    "robust": "cosine",
    "adaptive": "network",
    "period_min": 2,
    "period_max": 128,
    "codec_ladder": "int8,int4",
}
"""What older versions do not do."""


@pytest.fixture(autouse=True)
def toy_outer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OUTERS._entries, "toy", "no.such:module")


def test_what_older_versions_do_looks_as_it_did_to_them() -> None:
    assert set(LATER_SETTINGS) == {f.name for f in fields(SyncConfig)} - SETTINGS_1 == USED.keys()
    told = SyncConfig(**LATER_SETTINGS, merge="rda").to_dict()
    assert set(told) == SETTINGS_1 | {"partial", "sizes"}, "their defaults are others now"
    assert set(settings_in(told, PROTOCOL_VERSION)) == set(settings_in(told, 1)) == SETTINGS_1, "the syncer's own"
    assert SyncConfig().to_dict()["partial"] == "scaled"


@pytest.mark.parametrize("name", LATER_SETTINGS)
def test_a_setting_that_is_used_is_told(name: str) -> None:
    config = SyncConfig.from_dict({name: USED[name], "tokens_budget": 1000})
    told = config.to_dict()
    assert told[name] == USED[name] and set(told) == SETTINGS_1 | {"partial", "sizes", name}
    assert SyncConfig.from_dict(told) == config
    silent = SyncConfig.from_dict({**told, name: LATER_SETTINGS[name]}).to_dict()
    assert silent.keys() == SETTINGS_1 | {"partial", "sizes"}


@given(
    up=st.booleans(),
    down=st.booleans(),
    correction=st.sampled_from(CORRECTIONS),
    schedule=st.sampled_from(OUTER_SCHEDULES),
    restart=st.integers(0, 10**9),
    partial=st.sampled_from(PARTIALS),
)
def test_settings_come_back_from_their_dictionary(
    up: bool, down: bool, correction: str, schedule: str, restart: int, partial: str
) -> None:
    config = SyncConfig(
        feedback_up=up,
        feedback_down=down,
        correction=correction,
        outer_schedule=schedule,
        momentum_restart=restart,
        partial=partial,
        tokens_budget=1,
    )
    assert SyncConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"feedback_up": 1}, "feedback_up must be true or false, not 1"),
        ({"feedback_down": "no"}, "feedback_down must be true or false, not 'no'"),
        ({"momentum_restart": True}, "momentum_restart must be int, not True"),
        ({"momentum_restart": -1}, "momentum_restart must be a whole number from 0"),
        ({"momentum_restart": 10**10}, "momentum_restart must be a whole number from 0"),
        ({"correction": "halo"}, "correction must be one of none, heloco; not 'halo'"),
        ({"outer_schedule": "step"}, "outer_schedule must be one of constant, linear, cosine"),
        ({"outer_schedule": "linear"}, "no budget of them; give tokens_budget"),
        ({"partial": "half"}, "partial must be one of scaled, full; not 'half'"),
        ({"robust": "trimmed", "correction": "heloco"}, "use robust cosine, or correction none"),
        ({"robust": "on"}, "robust must be one of off, cosine, trimmed; not 'on'"),
        ({"codec_up": "int3"}, r"codec_up is 'int3', which is no codec .*fp32, bf16, int8, int4, int2"),
        ({"merge": "median"}, "merge is 'median', which is no merge method.*half-rda, rda, mean, or register it"),
        ({"outer": "adam"}, "outer is 'adam', which is no outer optimizer.*nesterov"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SyncConfig.from_dict(values)


@pytest.mark.parametrize("value", [1, "true", None])
def test_a_switch_is_true_or_false(value: object) -> None:
    with pytest.raises(ConfigError, match="feedback_up must be true or false"):
        SyncConfig(feedback_up=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(("schedule", "at_half"), [("constant", 1.0), ("linear", 0.55), ("cosine", 0.55)])
def test_the_outer_step_falls_to_a_tenth(schedule: str, at_half: float) -> None:
    config = SyncConfig(outer_schedule=schedule, tokens_budget=1000)
    factors = [step_share(config, tokens, [1, 1], []) for tokens in range(0, 1501, 50)]
    end = 1.0 if schedule == "constant" else 0.1
    assert factors[0] == 1.0 and factors[-1] == pytest.approx(end) and factors[20] == pytest.approx(end)
    assert factors[10] == pytest.approx(at_half)
    assert factors == sorted(factors, reverse=True)
    if schedule == "cosine":
        assert factors[3] > 0.95 > 1 - 0.9 * 0.15  # it stays high for longer than the straight line


def test_a_partial_merge_takes_a_part_of_the_step() -> None:
    scaled, full, uniform = SyncConfig(), SyncConfig(partial="full"), SyncConfig(weights="uniform")
    assert scales_steps(scaled) and not scales_steps(full)
    assert step_share(scaled, 0, [24], [24, 24, 24]) == 0.25
    assert step_share(scaled, 0, [24, 24], []) == step_share(scaled, 0, [24], [0, -1]) == 1.0, "nothing is missing"
    assert step_share(scaled, 0, [24], [3]) == 24 / 27, "a slow one holds little"
    assert step_share(uniform, 0, [24], [3]) == 0.5
    forgets, halves = replace(scaled, age_discount=0.0), replace(scaled, age_discount=0.5)
    assert step_share(forgets, 0, [24], [24]) == 1.0, "what comes late weighs nothing: nothing is waited for"
    assert step_share(halves, 0, [24], [24]) == 24 / 36
    assert step_share(scaled, 0, [0], [3]) == 1.0 and step_share(full, 0, [1], [1]) == 1.0
    both = SyncConfig(outer_schedule="linear", tokens_budget=1000)
    assert step_share(both, 500, [2], [2]) == pytest.approx(0.5 * 0.55)


def test_what_an_older_learner_would_have_to_follow_is_a_refusal() -> None:
    old = Hello("a", "i", 1, ())
    for config, named in (
        (SyncConfig(codec_up="int2"), "codec_up int2"),
        (SyncConfig(codec_down="int2", feedback_up=False), "codec_down int2 and feedback_up off"),
    ):
        refusal = check_settings(old, config)
        assert refusal is not None and refusal.code == Refusal.PROTOCOL
        assert named in refusal.detail and "install the syncer's version" in refusal.detail
        assert check_settings(replace(old, protocol=PROTOCOL_VERSION), config) is None


def test_what_only_the_syncer_does_is_no_concern_of_an_older_learner() -> None:
    used = {**USED, "feedback_up": True}
    config = SyncConfig(**used, tokens_budget=1)
    assert check_settings(Hello("a", "i", 1, ()), config) is None
    assert set(settings_in(config.to_dict(), 1)) == SETTINGS_1 - {"merge"}
    assert settings_in(SyncConfig(merge="rda").to_dict(), 1)["merge"] == "rda"
