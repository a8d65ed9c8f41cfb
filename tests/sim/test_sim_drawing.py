"""A seed is its scenario, and the first thousand seeds leave nothing out: no setting, no value of one, no fault."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

import atoll.core
from atoll.core.config import SyncConfig, parse_adopt, parse_quorum
from atoll.core.policy import fragments_for
from atoll.core.registry import Registry
from atoll.errors import ConfigError
from atoll.instruments.chaos import DIRECTIONS, KINDS
from atoll.instruments.sim.drawing import AMOUNTS_DRAWN, DIRECTED, DRAW_VERSION, LARGE, SETTINGS, draw, is_default
from atoll.instruments.sim.scenario import AMOUNTS, DURABILITIES, SIM_KINDS, LearnerSpec, Scenario, to_json

SEEDS = 1000
DEFAULTS = SyncConfig(fragments=fragments_for(LARGE, SyncConfig().sync_every))
"""As a large model gets them: 0 fragments stand for what its size says."""


@pytest.fixture(scope="module")
def scenarios() -> list[Scenario]:
    return [draw(seed) for seed in range(SEEDS)]


# ---------------------------------------------------------------- one seed


def test_a_seed_is_its_scenario() -> None:
    for seed in (0, 7, 4711, 2**64 - 1):
        assert draw(seed) == draw(seed) and draw(seed).draw == DRAW_VERSION
    assert len({to_json(draw(seed)) for seed in range(50)}) == 50


def test_faults_begin_in_order_and_in_time() -> None:
    for seed in range(100):
        scenario = draw(seed)
        begins = [fault.at_s for fault in scenario.faults]
        assert begins == sorted(begins)
        assert all(0.0 <= at_s <= scenario.seconds for at_s in begins)


@pytest.mark.parametrize("seed", [-1, True, 2**64, 1.0, "7", None])
def test_a_seed_that_is_none(seed: Any) -> None:
    with pytest.raises(ConfigError, match="seed must be a whole number"):
        draw(seed)


# ---------------------------------------------------------------- settings


def test_every_third_seed_runs_what_a_user_gets_who_chooses_nothing(scenarios: list[Scenario]) -> None:
    defaults = [scenario for scenario in scenarios if scenario.seed % 3 == 0]
    assert all(is_default(scenario.config) for scenario in defaults)
    assert sum(is_default(scenario.config) for scenario in scenarios) <= len(defaults) + 1
    assert {fault.kind for scenario in defaults for fault in scenario.faults} == set(SIM_KINDS)


def choices() -> set[str]:
    """Every word that is a choice of some setting: names in registries, and in tuples of names, of the core."""
    words: set[str] = set()
    for found in pkgutil.iter_modules(atoll.core.__path__, "atoll.core."):
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, Registry):
                words.update(value.builtin)
            elif isinstance(value, tuple) and all(isinstance(word, str) for word in value):
                words.update(value)
    return words


def accepted(setting: str, words: Iterable[str]) -> set[str]:
    """Those that this setting may have."""
    good = set()
    for word in words:
        try:
            good.add(getattr(replace(DEFAULTS, tokens_budget=1, **{setting: word}), setting))
        except ConfigError:
            continue
    return good


def quorum_form(quorum: str) -> str:
    return "all" if quorum == "all" else "number" if parse_quorum(quorum)[0] else "share"


FORMS = {
    "quorum": (quorum_form, {"all", "number", "share"}),
    "adopt": (lambda adopt: parse_adopt(adopt)[0], {"rebase", "overwrite", "mix"}),
}
"""Settings that are a word with a number in it: how to tell their kinds apart, and all there are."""


def never_drawn(configs: Sequence[SyncConfig]) -> list[str]:
    """What no scenario tries of what a user can choose. It asks the settings themselves, so that a new one is in it."""
    missing = []
    words = choices()
    for setting in fields(SyncConfig):
        name, drawn = setting.name, {getattr(config, setting.name) for config in configs}
        wanted: set[Any] = {getattr(DEFAULTS, name)}
        if isinstance(setting.default, bool):
            wanted = {True, False}
        elif name in FORMS:
            form, wanted = FORMS[name]
            drawn |= {form(value) for value in drawn}
        elif isinstance(setting.default, str):
            wanted |= accepted(name, words)
            if wanted == {setting.default} and setting.default not in words:
                missing.append(f"{name}: its choices are in no registry and no tuple of names in atoll.core")
        elif len(drawn) < 2:
            missing.append(f"{name}: any other value than {drawn}")
        missing += [f"{name}={value}" for value in sorted(wanted - drawn, key=str)]
    return missing


def test_the_first_thousand_seeds_draw_every_setting_and_every_value(scenarios: list[Scenario]) -> None:
    """Ten thousand seeds once never drew the default merge."""
    configs = [scenario.config for scenario in scenarios]
    assert never_drawn(configs) == [], (
        "put these into SETTINGS of atoll.instruments.sim.drawing, and raise DRAW_VERSION"
    )
    for name, values in SETTINGS.items():
        assert set(values) <= {getattr(config, name) for config in configs}, name


def test_what_is_never_drawn_is_named() -> None:
    missing = never_drawn([DEFAULTS] * 3)
    for text in (
        "merge=rda",
        "codec_up=int2",
        "feedback_down=False",
        "adopt=mix",
        "quorum=all",
        "outer_schedule=cosine",
    ):
        assert text in missing
    for setting in fields(SyncConfig):
        if isinstance(setting.default, int | float) and not isinstance(setting.default, bool):
            assert any(text.startswith(f"{setting.name}: any other value") for text in missing), setting.name
    assert "carry_versions_max=12" in never_drawn([replace(DEFAULTS, carry_versions_max=4)])


# ---------------------------------------------------------------- worlds and faults


def test_every_part_of_the_world_is_drawn_in_more_than_one_way(scenarios: list[Scenario]) -> None:
    specs = [spec for scenario in scenarios for spec in scenario.learners]
    for entry in fields(LearnerSpec):
        if entry.name == "lies":  # for a test and the lab; here lies are faults
            continue
        assert len({getattr(spec, entry.name) for spec in specs}) > 1, entry.name
    for entry in fields(Scenario):
        if entry.name not in ("draw",):
            assert len({str(getattr(scenario, entry.name)) for scenario in scenarios}) > 1, entry.name
    assert {scenario.durability for scenario in scenarios} == set(DURABILITIES)
    assert {len(scenario.learners) for scenario in scenarios} == {1, 2, 3, 4, 5, 6}
    assert {scenario.config.synchronous for scenario in scenarios} == {True, False}
    assert not all(scenario.faults for scenario in scenarios), "some are undisturbed"


def test_every_fault_is_drawn_in_every_form(scenarios: list[Scenario]) -> None:
    faults = [fault for scenario in scenarios for fault in scenario.faults]
    assert {fault.kind for fault in faults} == set(SIM_KINDS)
    assert {(fault.kind, fault.target == "syncer") for fault in faults if fault.kind in ("kill", "freeze")} == {
        (kind, syncer) for kind in ("kill", "freeze") for syncer in (True, False)
    }
    assert {fault.variant for fault in faults if fault.kind == "poison"} == set(KINDS["poison"].variants)
    for kind in DIRECTED:
        assert {fault.direction for fault in faults if fault.kind == kind} == set(DIRECTIONS), kind
    assert set(AMOUNTS_DRAWN) == set(AMOUNTS)
    for kind, amounts in AMOUNTS_DRAWN.items():
        assert {fault.amount for fault in faults if fault.kind == kind} == set(amounts), kind
