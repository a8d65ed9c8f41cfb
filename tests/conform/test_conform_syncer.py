"""Syncers are held to the wire contract: ours keeps it, and flaws that are put into it are found by their names."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from cluster import SyncerProcess, SyncerThread

from atoll.core import SyncConfig
from atoll.errors import ConfigError, UnreachableError
from atoll.instruments.conform import SYNCER_CLAUSES, Keeping, Report, SyncerExamOptions, examine_syncer

TOKEN = "the-token-of-this-exam"
OPTIONS = ("--learners", "2", "--fragments", "2", "--sync-every", "4")
CONFIG = SyncConfig(sync_every=4, fragments=2, learners_expected=2)


def examine(address: str, *, token: str = TOKEN, patience_s: float = 60.0, returning: bool = False) -> Report:
    report = Report(SYNCER_CLAUSES)
    options = SyncerExamOptions(address, token=token, patience_s=patience_s, returning=returning)
    asyncio.run(examine_syncer(report, options, lambda _text: None))
    return report


def said(report: Report) -> str:
    return "\n".join(f"{f.clause.name}: {f.detail}" for f in report.findings.values() if f.verdict is Keeping.BROKEN)


def tried(report: Report) -> set[str]:
    return {name for name, finding in report.findings.items() if finding.verdict is not Keeping.UNTRIED}


def test_our_syncer_keeps_every_clause(tmp_path: Path) -> None:
    looked: set[str] = set()
    for returning in (False, True):
        folder = tmp_path / str(returning)
        folder.mkdir()
        syncer = SyncerProcess(folder, *OPTIONS, ATOLL_TOKEN=TOKEN)
        report = examine(syncer.address, returning=returning)
        syncer.stop()
        assert report.conforms, said(report)
        looked |= tried(report)
    assert looked == set(SYNCER_CLAUSES)


def broken_by(monkeypatch: pytest.MonkeyPatch, place: str, flaw: object) -> set[str]:
    monkeypatch.setattr(place, flaw)
    syncer = SyncerThread(CONFIG, token=TOKEN)
    try:
        report = examine(syncer.address, patience_s=10.0)
    finally:
        syncer.stop()
    return {name for name, finding in report.findings.items() if finding.verdict is Keeping.BROKEN}


def test_a_syncer_that_looks_at_no_secrets_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "push.secret" in broken_by(monkeypatch, "atoll.core.admission.same_secret", lambda *_: True)


def test_a_syncer_with_wrong_seals_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def seal(message: bytes) -> bytes:
        return message + b"\xc1\x3e" + bytes(8)

    assert "seal.right" in broken_by(monkeypatch, "atoll.wire.sessions.seal", seal)


def test_a_syncer_that_is_not_there_or_not_fresh_is_an_error() -> None:
    with pytest.raises(UnreachableError, match="start one there"):
        examine("127.0.0.1:9", patience_s=5.0)
    syncer = SyncerThread(CONFIG, token=TOKEN)
    try:
        examine(syncer.address)
        with pytest.raises(ConfigError, match="start a fresh one"):
            examine(syncer.address)
    finally:
        syncer.stop()
