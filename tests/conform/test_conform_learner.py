"""Learners are held to the wire contract: ours keep it, a foreign one does too, and each flaw is found by its name."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from cluster import TrainingThread
from said import Command, command

from atoll.core import SyncConfig
from atoll.errors import FencedError, RefusedError
from atoll.instruments.conform import (
    LEARNER_CLAUSES,
    Keeping,
    LearnerExamOptions,
    Report,
    examine_learner,
)
from atoll.instruments.conform.examine_learner import CONFIG, SCENES
from atoll.instruments.conform.learner_exam import LearnerExam
from atoll.instruments.conform.played_syncer import PlayedSyncer

FOREIGN = str(Path(__file__).parent / "foreign_learner.py")
TOKEN = "the-token-of-this-exam"


def broken(report: Report) -> set[str]:
    return {name for name, finding in report.findings.items() if finding.verdict is Keeping.BROKEN}


def said(report: Report) -> str:
    return "\n".join(f"{f.clause.name}: {f.detail}" for f in report.findings.values() if f.verdict is Keeping.BROKEN)


async def play_for_ours(report: Report, name: str, config: SyncConfig = CONFIG) -> TrainingThread:
    exam = LearnerExam(report, config, token=TOKEN, patience_s=60.0)
    syncer = PlayedSyncer(exam)
    await syncer.start("127.0.0.1:0")
    ours = TrainingThread(syncer.address, "ours", token=TOKEN)
    try:
        await SCENES[name](exam)
    finally:
        await syncer.stop()
        await asyncio.to_thread(ours.stop)
    return ours


def test_our_learner_keeps_every_clause() -> None:
    report = Report(LEARNER_CLAUSES)
    errors = [asyncio.run(play_for_ours(report, name)).error for name in SCENES]
    assert report.conforms, said(report)
    assert report.count(Keeping.UNTRIED) == 0, [n for n, f in report.findings.items() if f.verdict is Keeping.UNTRIED]
    assert errors[0] is None
    assert isinstance(errors[1], RefusedError) and isinstance(errors[2], FencedError)


def test_our_learner_keeps_them_with_other_codecs() -> None:
    report = Report(LEARNER_CLAUSES)
    config = SyncConfig(sync_every=4, fragments=1, overlap=2, quorum="1", codec_up="fp32", codec_down="int8")
    asyncio.run(play_for_ours(report, "a run", config))
    assert report.conforms, said(report)


def examine_foreign(*flaw: str) -> Report:
    report = Report(LEARNER_CLAUSES)
    options = LearnerExamOptions(command=(sys.executable, FOREIGN, *flaw), environment=dict(os.environ))
    asyncio.run(examine_learner(report, options, lambda _text: None))
    return report


def test_a_learner_of_another_maker_keeps_them_too() -> None:
    report = examine_foreign()
    assert report.conforms, said(report)
    # It speaks one protocol only, so nothing older was ever sent.
    assert {n for n, f in report.findings.items() if f.verdict is Keeping.UNTRIED} == {"protocol.fields"}


@pytest.mark.parametrize(
    ("flaw", "clause"),
    [
        ("wrong-base", "contribution.base"),
        ("wrong-checksum", "push.checksum"),
        ("ignores-refusal", "refused.final"),
        ("leaves-with-it", "stop.handed"),
        ("no-secret", "push.names"),
        ("wrong-seal", "seal.right"),
        ("adopts-anything", "adopt.checked"),
        ("believes-damage", "seal.checked"),
    ],
)
def test_a_flaw_is_found_by_name(flaw: str, clause: str) -> None:
    report = examine_foreign(flaw)
    assert clause in broken(report), said(report)
    assert not report.conforms
    assert report.findings[clause].detail


@pytest.fixture
def atoll(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return command(monkeypatch=monkeypatch, capsys=capsys)


def test_the_command_says_it_line_by_line_and_leaves_with_1(atoll: Command) -> None:
    result = atoll("conform", "learner", "--json", "--", sys.executable, FOREIGN, "wrong-base")
    assert result.code == 1
    told = json.loads(result.stdout)
    assert not told["conforms"] and told["broken"] == 1
    (line,) = [c for c in told["clauses"] if c["verdict"] == "not kept"]
    assert line["clause"] == "contribution.base" and line["section"] == "Rounds" and "base 7" in line["detail"]
    assert "not kept   contribution.base" in result.stderr


def test_a_command_and_an_address_do_not_go_together(atoll: Command) -> None:
    for arguments in (("conform", "learner"), ("conform", "learner", "--listen", "127.0.0.1:0", "--", "true")):
        result = atoll(*arguments)
        assert result.code == 2 and "one of the two" in result.stderr
    result = atoll("conform", "learner", "--", "/no/such/learner")
    assert result.code == 2 and "mend the command" in result.stderr
