"""The keys of a job: made when it is submitted, as far as they are missing, and one for each island."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path

from atoll.core import Role
from atoll.engines.job import LaunchJob
from atoll.engines.parts import EVERYBODY, OPERATOR, TLS_NAME, token_file
from atoll.keys import CERTIFICATE_FILE, KEY_FILE, KEYS_FILE, issue, make_authority, read_keys, write_private
from atoll.private import make_private_folder
from atoll.wire import read_certificate

CERTIFICATE_DAYS = 365


def keys_folder(job: LaunchJob) -> Path | None:
    """Where the launcher keeps them; None for a job without keys."""
    return Path(job.syncer.keys).expanduser().resolve() if job.syncer.has_keys else None


def make_keys(job: LaunchJob, learners: Iterable[str], hosts: Iterable[str] = ()) -> None:
    """An authority and a certificate if there are none, and a token for whoever has none; with relays one for all."""
    folder = keys_folder(job)
    if folder is None:
        return
    if not (folder / KEYS_FILE).exists():
        names = dict.fromkeys([TLS_NAME, "localhost", "127.0.0.1", *hosts, *job.syncer.hosts])
        make_authority(folder, list(names), days=CERTIFICATE_DAYS)
    make_private_folder(folder / "tokens")
    if job.relays.sites:
        if not (folder / token_file(EVERYBODY)).exists():
            write_private(folder / token_file(EVERYBODY), f"{secrets.token_urlsafe()}\n".encode())
        return
    known = read_keys(folder / KEYS_FILE)
    for name in [OPERATOR, *learners]:
        path = folder / token_file(name)
        if path.exists() and name in known and not known[name].revoked:
            continue
        role = Role.OPERATOR if name == OPERATOR else Role.LEARNER
        write_private(path, f"{issue(folder, name, role, again=True)}\n".encode())


def tls_name(job: LaunchJob) -> str:
    """What learners check the certificate for: the launcher's own name, if it made it; else the host's."""
    folder = keys_folder(job)
    if folder is None or not (folder / CERTIFICATE_FILE).exists():
        return TLS_NAME
    names = read_certificate(str(folder / CERTIFICATE_FILE), str(folder / KEY_FILE)).names
    return TLS_NAME if TLS_NAME in names else ""
