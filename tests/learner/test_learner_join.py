"""Joining by hand: the first failure is told soon with its true cause, and a refusal is one sentence."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import certificate
from cluster import WAIT_S, SyncerThread, TrainingThread, small_model, spawn
from ports import quiet_port

from atoll.core.config import SyncConfig
from atoll.errors import CertificateError
from atoll.learner import Learner
from atoll.learner.last_words import LastWords
from atoll.wire import ClientOptions, ask_to_leave

SCRIPT = """
import sys, torch, atoll
model = torch.nn.Linear(4, 4)
with atoll.Learner(model, address=sys.argv[1], token=sys.argv[2], learner_id="by-hand", join_timeout_s=60) as learner:
    pass
"""


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for part in reversed(made):
        part.stop()


def test_the_cause_is_told_once_and_joining_goes_on(parts: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{quiet_port()}"
    learner = TrainingThread(address, "early")
    parts.append(learner)
    deadline_s = time.monotonic() + WAIT_S
    while "connection refused" not in learner.learner._doctor.cause and time.monotonic() < deadline_s:
        time.sleep(0.05)
    time.sleep(0.5)  # it is printed right after it is found
    told = capfd.readouterr().err
    assert f"atoll: early has not joined yet: connection refused at {address}" in told
    time.sleep(3.0)  # a look later, nothing is new
    assert capfd.readouterr().err == "" and told.count("\n") == 1
    syncer = SyncerThread(SyncConfig(fragments=2), listen=address)
    parts.insert(0, syncer)
    learner.wait_steps(3)


@pytest.mark.parametrize("names", [("localhost", "127.0.0.1"), ("elsewhere.example",)], ids=["wrong CA", "wrong name"])
def test_a_certificate_that_cannot_be_trusted_ends_joining_at_once(
    parts: list[Any], tmp_path: Path, names: tuple[str, ...]
) -> None:
    pem, key = certificate(tmp_path, *names, stem="own")
    other, _ = certificate(tmp_path, "127.0.0.1", stem="other")
    syncer = SyncerThread(SyncConfig(fragments=2), token="t", tls_certificate=pem, tls_key=key)
    parts.append(syncer)
    trusted, words = (other, "cannot be checked with") if "127.0.0.1" in names else (pem, "is not for '127.0.0.1'")
    raised: list[BaseException] = []

    def join() -> None:
        try:
            Learner(small_model(), address=syncer.address, token="t", tls_ca=trusted, join_timeout_s=1e6).start()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert isinstance(raised[0], CertificateError) and words in str(raised[0])


def test_a_script_that_is_refused_ends_with_one_sentence(parts: list[Any]) -> None:
    syncer = SyncerThread(SyncConfig(fragments=1), token="right")
    parts.append(syncer)
    refused = spawn(SCRIPT, syncer.address, "wrong")
    said, _ = refused.communicate(timeout=WAIT_S)
    # On a busy machine joining may also have told that nobody answers yet.
    assert refused.returncode == 1 and "Traceback" not in said and said.count("wrong or missing run token") == 1, said
    assert said.startswith("atoll: wrong or missing run token") and "ATOLL_TOKEN" in said


def test_a_wrong_setting_names_the_line_and_other_errors_keep_their_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[BaseException] = []
    hook = LastWords(lambda kind, error, trace: others.append(error))

    def dies_of(act: Callable[[], object]) -> str:
        try:
            act()
        except Exception as error:
            hook(type(error), error, error.__traceback__)
        return capsys.readouterr().err

    def misused() -> None:
        try:
            int("x")
        except ValueError:
            Learner(small_model(), address="nowhere")  # the first error is the one to see

    monkeypatch.delenv("ATOLL_SYNCER", raising=False)
    said = dies_of(lambda: Learner(small_model()))
    assert (
        said.startswith("atoll: no syncer to join") and "test_learner_join.py, line" in said and said.count("\n") == 1
    )
    here = Path(__file__)  # a file, and no certificate
    said = dies_of(lambda: Learner(small_model(), address="127.0.0.1:1", tls_ca=str(here)).start())
    assert "ATOLL_TLS_CA" in said and f"({here}, line" in said, said
    assert not others
    for act in (lambda: 1 // 0, misused, lambda: Learner(small_model(), address="127.0.0.1:1").step(tokens=1)):
        assert dies_of(act) == ""
    monkeypatch.setenv("ATOLL_DEBUG", "1")
    assert dies_of(lambda: Learner(small_model())) == ""
    assert [type(error).__name__ for error in others] == [
        *("ZeroDivisionError", "ConfigError", "LocalProtocolError", "ConfigError")
    ]


def test_a_learner_that_is_asked_to_leave_hands_over_and_exits_while_the_others_train_on(parts: list[Any]) -> None:
    syncer = SyncerThread(SyncConfig(fragments=2, learners_expected=2))
    asked, other = TrainingThread(syncer.address, "asked"), TrainingThread(syncer.address, "other", seed=1)
    patient = TrainingThread(syncer.address, "patient", seed=2, leave_on_sigterm=False)
    parts.extend([syncer, asked, other, patient])
    for learner in (asked, other, patient):
        learner.wait_steps(5)
    for name in ("asked", "patient"):
        assert asyncio.run(ask_to_leave(ClientOptions(syncer.address), name)) == "active"
    for learner in (asked, patient):
        learner.thread.join(WAIT_S)
    assert isinstance(asked.error, SystemExit) and asked.error.code == 0  # as after SIGTERM
    assert patient.error is None and patient.learner.done  # it handles its own end: its loop saw `done`
    states = syncer.ask(lambda shell: {name: str(m.state) for name, m in shell.machine.membership.members.items()})
    assert states == {"asked": "left", "other": "active", "patient": "left"}
    other.wait_steps(5)
    assert not other.learner.done
    syncer.check_ledger()
