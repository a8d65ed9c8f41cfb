"""`dataclass` for what machines say and hear: as `dataclasses.dataclass`, and cheap to make.

A frozen dataclass sets each field through `object.__setattr__`. A report of nine fields then takes six times as long to
make as a plain one, and machines live on making such values: a fifth of a simulated second was spent there. So the type
checker alone holds them frozen (it sees the real decorator, and `mypy --strict` runs over all of the source); when the
program runs, they are plain objects with slots that are compared and hashed by their fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:

    def dataclass(*, frozen: bool = False, **options: Any) -> Callable[[type], type]:
        return dataclasses.dataclass(unsafe_hash=frozen, **options)

    def replace(value: Any, **changes: Any) -> Any:
        """`dataclasses.replace` for such values, at a third of its price."""
        made = type(value)(*_fields_of(type(value))(value))
        for name, changed in changes.items():
            setattr(made, name, changed)
        return made

    @cache
    def _fields_of(kind: type) -> Callable[[Any], tuple[Any, ...]]:
        names = [field.name for field in dataclasses.fields(kind)]
        read = attrgetter(*names)
        return read if len(names) > 1 else lambda value: (read(value),)
