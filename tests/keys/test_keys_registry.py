"""The registry of keys: what is written down, and what a running syncer makes of its changes."""

from __future__ import annotations

import json
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from atoll.core import Identity, Role
from atoll.errors import ConfigError
from atoll.keys import KEYS_FILE, KeyFile, issue, read_keys, revoke
from atoll.keys.registry import write_keys
from atoll.wire import split_key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_keys(tmp_path / KEYS_FILE, {})
    return tmp_path


def test_the_registry_holds_no_secret_and_is_its_owners(folder: Path) -> None:
    token = issue(folder, "paris", Role.LEARNER, tokens_per_step=4096)
    name, secret = split_key(token)
    assert name == "paris" and len(secret) >= 43, "256 bits"
    written = (folder / KEYS_FILE).read_text()
    assert secret not in written
    entry = json.loads(written)["keys"]["paris"]
    assert (entry["role"], entry["tokens_per_step"], entry["revoked"]) == ("learner", 4096, "")
    assert stat.S_IMODE((folder / KEYS_FILE).stat().st_mode) == 0o600
    assert issue(folder, "tokyo", Role.LEARNER) != issue(folder, "lima", Role.LEARNER)


def test_a_token_names_its_owner(folder: Path) -> None:
    tokens = {role: issue(folder, f"x.{role}", role) for role in Role}
    book = KeyFile(folder)
    for role, token in tokens.items():
        assert book.find(token) == Identity(f"x.{role}", role, 0)
    right = tokens[Role.LEARNER]
    for wrong in ("", "x", right[:-1], right + "A", right.replace("learner", "operator"), right[6:], right.upper()):
        assert isinstance(book.find(wrong), str), wrong


def test_a_running_syncer_hears_of_changes(folder: Path) -> None:
    first, second = issue(folder, "a", Role.LEARNER), issue(folder, "b", Role.LEARNER)
    book = KeyFile(folder / KEYS_FILE)
    assert book.look() == {}
    revoke(folder, "a")
    assert list(book.look()) == ["a"] and book.look() == {}
    found = book.find(first)
    assert isinstance(found, str) and "'a' was revoked" in found
    assert book.find("atoll.a.guess") == book.find("atoll.nobody.guess"), "who has not the secret hears nothing"
    again = issue(folder, "b", Role.LEARNER, again=True)
    assert book.find(again) == Identity("b", Role.LEARNER), "a new key counts at once"
    assert "replaced" in book.look()["b"] and isinstance(book.find(second), str)
    third = issue(folder, "a", Role.LEARNER)
    assert book.find(third) == Identity("a", Role.LEARNER) and isinstance(book.find(first), str)
    assert book.look() == {}


def test_another_role_ends_what_the_old_one_allowed(folder: Path) -> None:
    issue(folder, "a", Role.OPERATOR)
    book = KeyFile(folder)
    issue(folder, "a", Role.OBSERVER, again=True)
    assert list(book.look()) == ["a"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"keys": 1}', '{"keys": {"a": {}}}', '{"keys": {"a": {"role": "x"}}}']
)
def test_a_registry_that_is_none_changes_nothing(folder: Path, content: str) -> None:
    token = issue(folder, "a", Role.LEARNER)
    book = KeyFile(folder)
    (folder / KEYS_FILE).write_text(content)
    assert isinstance(book.find("atoll.b.guess"), str), "whoever asks first must not swallow the warning"
    with pytest.raises(ConfigError):
        book.look()
    assert book.look() == {} and book.find(token) == Identity("a", Role.LEARNER)
    with pytest.raises(ConfigError):
        KeyFile(folder)


def test_a_name_has_one_key(folder: Path) -> None:
    issue(folder, "a", Role.LEARNER)
    with pytest.raises(ConfigError, match="--again"):
        issue(folder, "a", Role.LEARNER)
    revoke(folder, "a")
    issue(folder, "a", Role.LEARNER)
    with pytest.raises(ConfigError, match="no key 'b'"):
        revoke(folder, "b")


@pytest.mark.parametrize("name", ["", "x" * 65, "a b", "ü", "../a", ".a", "a\n"])
def test_names_are_plain(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a key"):
        issue(folder, name, Role.LEARNER)


def test_sizes_are_declared_for_learners_and_bounded(folder: Path) -> None:
    for size, role in ((-1, Role.LEARNER), (2**41, Role.LEARNER), (5, Role.OBSERVER)):
        with pytest.raises(ConfigError, match="--tokens-per-step"):
            issue(folder, "a", role, tokens_per_step=size)
    issue(folder, "a", Role.LEARNER, tokens_per_step=2**40)
    assert read_keys(folder / KEYS_FILE)["a"].tokens_per_step == 2**40


def test_two_commands_at_a_time_lose_no_key(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: issue(folder, f"l{i}", Role.LEARNER), range(40)))
    assert len(read_keys(folder / KEYS_FILE)) == 40
