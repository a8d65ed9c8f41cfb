"""Things that are chosen by name."""

from __future__ import annotations

import math

import pytest

from atoll.core.registry import Registry
from atoll.errors import ConfigError


def test_what_is_built_in_is_loaded_when_it_is_asked_for() -> None:
    shapes: Registry[object] = Registry("shape", {"round": "math:pi", "lost": "no_such_module:thing"})
    assert shapes.names() == ("round", "lost")
    assert shapes.get("round") is math.pi


def test_a_users_own_is_found_by_its_name_and_replaces_nothing() -> None:
    shapes: Registry[object] = Registry("shape", {"round": "math:pi"})
    own = object()
    shapes.register("mine", own)
    shapes.register("mine", own)
    assert shapes.get("mine") is own
    with pytest.raises(ConfigError, match="there is a shape 'mine' already"):
        shapes.register("mine", object())
    with pytest.raises(ConfigError, match="there is a shape 'round' already"):
        shapes.register("round", own)


@pytest.mark.parametrize("name", ["", "Two Words", "x" * 65, "../up"])
def test_a_name_that_settings_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a shape"):
        Registry("shape", {}).register(name, object())


def test_a_misspelt_name_is_told_with_the_nearest() -> None:
    shapes: Registry[object] = Registry("shape", {"round": "math:pi"})
    with pytest.raises(ConfigError, match=r"outline is 'ronud', which is no shape \(did you mean 'round'\?\)"):
        shapes.check("outline", "ronud")
