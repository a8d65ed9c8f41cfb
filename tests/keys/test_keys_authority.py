"""Certificates that `atoll keys` makes, and the commands themselves."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest
from said import command

from atoll.errors import ConfigError
from atoll.wire.certificate import read_certificate

pytest.importorskip("cryptography", reason="pip install 'atoll[keys]'")

from atoll.keys import make_authority, renew_certificate

NAMES = ("syncer.example", "198.18.0.77", "::1")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_syncer_can_serve_with_what_init_makes(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    make_authority(folder, NAMES, days=30)
    made = read_certificate(str(folder / "cert.pem"), str(folder / "key.pem"))
    assert made.check(time.time()) == [] and set(made.names) >= {"syncer.example", "198.18.0.77"}
    assert 29 < (made.until_s - time.time()) / 86_400 < 31
    assert [mode(folder / name) for name in ("ca.key", "key.pem", "keys.json")] == [0o600] * 3
    assert mode(folder) == 0o700


def test_renewing_keeps_the_authority_and_the_names(tmp_path: Path) -> None:
    make_authority(tmp_path / "keys", NAMES, days=1)
    before = {name: (tmp_path / "keys" / name).read_bytes() for name in ("ca.pem", "cert.pem", "key.pem")}
    assert renew_certificate(tmp_path / "keys", days=400) == list(NAMES)
    after = {name: (tmp_path / "keys" / name).read_bytes() for name in before}
    assert [name for name in before if before[name] != after[name]] == ["cert.pem", "key.pem"]
    made = read_certificate(str(tmp_path / "keys/cert.pem"), str(tmp_path / "keys/key.pem"))
    assert (made.until_s - time.time()) / 86_400 > 399
    assert renew_certificate(tmp_path / "keys", ["other.example"], days=1) == ["other.example"]


@pytest.mark.parametrize("names", [(), ("host:7077",), ("https://host",), ("hüst",)])
def test_names_are_host_names_and_addresses(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        make_authority(tmp_path / "keys", names, days=30)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    make_authority(tmp_path / "keys", NAMES, days=30)
    with pytest.raises(ConfigError, match="has keys"):
        make_authority(tmp_path / "keys", NAMES, days=30)
    with pytest.raises(ConfigError, match="atoll keys init"):
        renew_certificate(tmp_path / "nothing", days=30)


def test_the_commands_do_what_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = command("keys", monkeypatch=monkeypatch, capsys=capsys)
    assert keys("init", "keys", "--name", "a.example", "--name", "10.0.0.1").code == 0
    assert keys("issue", "keys", "paris", "--tokens-per-step", 4096).code == 0
    token = (tmp_path / "paris.token").read_text()
    assert token.startswith("atoll.paris.") and mode(tmp_path / "paris.token") == 0o600
    assert keys("issue", "keys", "eye", "--role", "observer", "--to", "-").stdout.startswith("atoll.eye.")
    refused = keys("issue", "keys", "paris")
    assert refused.code != 0 and "--again" in refused.stderr
    assert keys("revoke", "keys", "paris").code == 0
    listed = keys("list", "keys").stdout.splitlines()
    assert [line.split("\t")[:3] for line in listed] == [["eye", "observer", "-"], ["paris", "learner", "4096"]]
    assert listed[0].endswith("valid") and "revoked" in listed[1] and "sha256" not in "".join(listed)
    assert "a.example, 10.0.0.1" in keys("renew", "keys", "--days", 10).stdout
