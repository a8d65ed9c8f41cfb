"""What the syncer does at its end when the model cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import SyncerThread, TrainingThread
from safetensors.numpy import load_file

from atoll.core.config import SyncConfig
from atoll.observe import NullWriter
from atoll.syncer.ending import ModelFile


def test_a_model_that_cannot_be_written_is_an_exit_status_and_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    syncer = SyncerThread(SyncConfig(fragments=2))
    learner = TrainingThread(syncer.address, "only", steps=5)
    learner.thread.join(60)
    try:
        nowhere = tmp_path / "no such folder"
        assert syncer.ask(lambda shell: ModelFile(shell, nowhere, NullWriter(), print).write()) == 1
        assert "could not write the model" in capsys.readouterr().err
        assert syncer.ask(lambda shell: ModelFile(shell, tmp_path, NullWriter(), print).write()) == 0
        assert f"the model is written: {tmp_path / 'model.safetensors'}" in capsys.readouterr().out
    finally:
        syncer.stop()
    saved = load_file(tmp_path / "model.safetensors")
    shapes = {name: tuple(parameter.shape) for name, parameter in learner.model.named_parameters()}
    assert {name: array.shape for name, array in saved.items()} == shapes


def test_the_status_says_who_holds_rounds_up() -> None:
    syncer = SyncerThread(SyncConfig(fragments=2))
    said = "nothing is merged: a round waits for the answers of l2"
    syncer.ask(lambda shell: setattr(shell.machine._merges, "text", said))
    assert syncer.ask(lambda shell: shell.status())["waits"] == said
    syncer.stop()
