"""Modules that are to be loaded in every process of a run before it takes part: ATOLL_PRELOAD=module,module.

There a user's own codecs and policies register themselves, and a storm installs what goes wrong inside a process.
Whoever reads the environment (`atoll.app`, `learner.environment`) hands the value in.
"""

from __future__ import annotations

from importlib import import_module

from atoll.errors import ConfigError


def preload(names: str) -> None:
    """Import each, once. ConfigError for one that cannot be imported."""
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"ATOLL_PRELOAD names {name!r}, which cannot be imported ({error}); mend it or unset the variable"
            ) from error
