"""Names that settings may have, and what stands behind each: codecs, merges, outer optimizers, pacing policies.

    CODECS = Registry("codec", {"int4": "atoll.codec:INT4", ...})     built in, loaded on first use
    CODECS.register("mine", my_codec)                                 a user's own, before the run starts

A name may be that of a family and parameters, `topk:2%`: then a function makes the entry of what follows the colon.

Every process of a run looks names up in its own registries, so a user's own must be registered in each of them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Generic, TypeVar, cast

from atoll.errors import ConfigError

NAME_CHARS_MAX = 64
"""Names travel in settings and on tapes."""
T = TypeVar("T")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class Registry(Generic[T]):
    """What can be chosen by name. An entry is the thing itself or, so that nothing is imported early, `module:name`."""

    def __init__(self, what: str, builtin: Mapping[str, T | str], families: Mapping[str, str] | None = None) -> None:
        self.what = what
        self.families = dict(families or {})
        self.builtin = (*builtin, *self.families)
        self._entries: dict[str, T | str] = dict(builtin)

    def register(self, name: str, item: T | str) -> None:
        """Add one. ConfigError for a name that is taken by something else, or that settings cannot carry."""
        if len(name) > NAME_CHARS_MAX or not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} cannot name a {self.what}: use at most {NAME_CHARS_MAX} of a-z, 0-9, '.', '_' and '-'"
            )
        if name in self.families:
            raise ConfigError(f"there is a {self.what} {name!r} already: choose another name")
        if self._entries.get(name, item) is not item and self._entries[name] != item:
            raise ConfigError(f"there is a {self.what} {name!r} already: choose another name")
        self._entries[name] = item

    def names(self) -> tuple[str, ...]:
        return (*self._entries, *self.families)

    def check(self, setting: str, name: str) -> str:
        """The name itself, if there is one like it; else ConfigError with the nearest."""
        if self.family(name) in self.families:
            self._make(name)
        elif name not in self._entries:
            near = difflib.get_close_matches(self.family(name), self.names(), 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ConfigError(
                f"{setting} is {name!r}, which is no {self.what}{hint}: choose one of {', '.join(self.names())}, or "
                f"register it in every process of the run"
            )
        return name

    def family(self, name: str) -> str:
        """A name without its parameters."""
        return name.partition(":")[0]

    def _make(self, name: str) -> T:
        family, _, parameters = name.partition(":")
        module, _, attribute = self.families[family].partition(":")
        make = cast(Callable[[str], T], getattr(import_module(module), attribute))
        return make(parameters)

    def get(self, name: str) -> T:
        if self.family(name) in self.families:
            return self._make(name)
        item = self._entries[self.check(self.what, name)]
        if isinstance(item, str):
            module, _, attribute = item.partition(":")
            item = cast(T, getattr(import_module(module), attribute))
            self._entries[name] = item
        return item
