"""What the product's rooms may do besides what the import contracts in pyproject.toml say."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

import atoll

PRODUCT = tuple(
    sorted(
        path.name
        for path in Path(atoll.__file__).parent.iterdir()
        if (path / "__init__.py").exists() and path.name != "instruments"
    )
)
FRONT_DOORS = {
    "cli/options.py",  # credentials that nothing keeps
    "jax/ranks.py",  # what torchrun says of this process
    "kernels/disk.py",  # where compiled kernels are kept
    "kernels/stored.py",  # with which settings of numba's they were compiled
    "launch/commands.py",  # PATH of the processes that are started
    "launch/process.py",  # their environment
    "launch/ranks.py",  # which GPUs there are to share out
    "learner/environment.py",  # who a learner is
    "zoo/worker.py",  # the same for the process of `atoll train`
    "store/remote_folder.py",  # where a cloud's own library would look, for an error message
    "wire/transport.py",  # sets two variables of gRPC's before it is imported
}


def test_only_front_doors_look_at_the_environment() -> None:
    home = Path(atoll.__file__).parent
    files = [path for room in PRODUCT for path in (home / room).rglob("*.py")]
    looking = {path for path in files if any(word in path.read_text() for word in ("os.environ", "getenv"))}
    assert {path.relative_to(home).as_posix() for path in looking} == FRONT_DOORS


INSIDE_A_MACHINE = re.compile(r"machine\.(book|fragments|healing|inner_slots|leases|ledger|membership|_\w+)\b")
"""What machines are made of. They are told things and asked questions; effects are the only other channel."""


def test_neither_shells_nor_instruments_reach_into_a_machine() -> None:
    home = Path(atoll.__file__).parent
    rooms = [*(home / room for room in PRODUCT if room != "core"), home / "instruments"]
    files = [path for room in rooms for path in room.rglob("*.py")]
    assert {path.name: found for path in files if (found := INSIDE_A_MACHINE.findall(path.read_text()))} == {}


SETS_IN_A_MACHINE = re.compile(r"machine\.\w+ (?:[-+|]?=) ")
A_VIEW = {"inner.py": ["machine.run = "], "island.py": ["machine.run = "]}
"""In learner/island/ and jax/: what a rank without the machine has in its place."""


def test_nobody_outside_sets_anything_in_a_machine() -> None:
    home = Path(atoll.__file__).parent
    files = [path for path in home.rglob("*.py") if "core" not in path.relative_to(home).parts]
    assert {path.name: found for path in files if (found := SETS_IN_A_MACHINE.findall(path.read_text()))} == A_VIEW


ONE_NAME_TWO_MEANINGS = {"Committed", "Refused", "Learner", "AtollCallback"}
"""Facts that the checkers are fed with are called as the event and the message that they come from. Users of torch and
of JAX each have their Learner, users of two trainers their AtollCallback."""


def test_a_class_name_has_one_meaning() -> None:
    home = Path(atoll.__file__).parent
    found: dict[str, set[str]] = {}
    for path in home.rglob("*.py"):
        if "generated" not in path.parts:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, set()).add(path.relative_to(home).as_posix())
    assert {name for name, places in found.items() if len(places) > 1} == ONE_NAME_TWO_MEANINGS


def doors() -> Any:
    """`scripts/doors` as a module."""
    loader = SourceFileLoader("doors", str(Path(__file__).parents[1] / "scripts" / "doors"))
    module = module_from_spec(spec_from_loader("doors", loader) or pytest.fail("no script"))
    loader.exec_module(module)
    return module


def test_rooms_are_entered_through_their_front_doors() -> None:
    assert list(doors().past_the_doors(Path(atoll.__file__).parents[1])) == []


def test_an_import_past_a_door_is_said_with_what_to_do(tmp_path: Path) -> None:
    for room, names in (("a", "from .inside import offered"), ("b", "")):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.pyi").write_text(names)
    (tmp_path / "a" / "inside.py").write_text("offered = hidden = 1")
    (tmp_path / "a" / "next_to_it.py").write_text("from a.inside import hidden")
    (tmp_path / "b" / "good.py").write_text("from a import offered")
    (tmp_path / "b" / "bad.py").write_text("from a.inside import offered\nfrom a import hidden\nimport a.inside")
    said = [text.partition("bad.py:")[2] for text in doors().past_the_doors(tmp_path)]
    assert said == [
        "1: goes past the door of a: import from a, and list it there",
        "2: a does not offer 'hidden': list it in its __init__.pyi",
        "3: goes past the door of a: import from a, and list it there",
    ]


@pytest.mark.parametrize("room", sorted(doors().rooms(Path(atoll.__file__).parents[1])))
def test_what_a_door_offers_is_there(room: str) -> None:
    module = import_module(room)
    assert module.__doc__ and module.__all__
    for name in module.__all__:
        assert getattr(module, name) is not None, name
