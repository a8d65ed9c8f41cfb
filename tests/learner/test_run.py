"""Several learners in one process, over real sockets: what holds in a healthy run, and under each kind of trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from cluster import Proxy, SyncerThread, TrainingThread, small_model
from torch import nn

from atoll import ConfigError, FencedError, Learner, RefusedError, UnreachableError
from atoll.core.config import SyncConfig
from atoll.core.layout import build_layout
from atoll.learner.parameters import into
from atoll.learner.torch_parameters import TorchParameters
from atoll.observe import events, read_events
from atoll.syncer import platform


def config(**changes: Any) -> SyncConfig:
    values = {"sync_every": 4, "fragments": 4, "overlap": 2, "quorum": "50%", "learners_expected": 2}
    return SyncConfig.from_dict({**values, **changes})


@pytest.fixture
def parts() -> Iterator[list[Any]]:
    """Things to stop at the end of a test, last first."""
    started: list[Any] = []
    yield started
    for part in reversed(started):
        part.stop()


def versions(syncer: SyncerThread) -> list[int]:
    return syncer.ask(lambda shell: [track.version for track in shell.machine.book.tracks])  # type: ignore[no-any-return]


def reaches(minimum: int) -> Any:
    return lambda shell: all(track.version >= minimum for track in shell.machine.book.tracks)


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
def test_theta_is_bit_identical_everywhere_with_every_codec(codec: str, parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(codec_up=codec, codec_down=codec), folder=tmp_path)
    parts.append(syncer)
    learners = [  # one keeps its copies on the host, one where its parameters are: the bits are the same
        TrainingThread(syncer.address, f"l{i}", seed=i, run_folder=tmp_path, copies_on_device=bool(i)) for i in range(2)
    ]
    parts += learners
    syncer.wait_for(reaches(6), "six versions of every fragment")
    for learner in learners:
        learner.stop()
    seen = []
    for learner in learners:
        vault = learner.learner._shell.vault
        assert vault is not None
        for index, published in enumerate(vault.current):
            assert published is not None and published.version >= 4
            theta = vault.arithmetic.on_host(published.theta)
            seen.append((index, published.version, xxhash.xxh3_64_intdigest(theta.data)))
    syncer.stop()
    told = {(e.fragment, e.version): e.checksum for _, _, e in read_events(tmp_path) if isinstance(e, events.Committed)}
    assert len(seen) == 8
    for fragment, version, checksum in seen:
        assert told[fragment, version] == checksum
    refetched = [e for _, _, e in read_events(tmp_path) if isinstance(e, events.Warned) and "differs" in e.text]
    assert refetched == []


def test_what_encoding_took_is_told_for_small_contributions_too(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(learners_expected=1))
    parts.append(syncer)
    learner = TrainingThread(syncer.address, "l0", run_folder=tmp_path)
    parts.append(learner)
    syncer.wait_for(reaches(1), "a version of every fragment")
    learner.stop()
    pushed = [event for _, _, event in read_events(tmp_path) if isinstance(event, events.LearnerPushed)]
    assert pushed and all(event.encode_ns > 0 for event in pushed)


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "mix:0.5"])
def test_everything_processed_is_accounted_for_at_the_end(adopt: str, parts: list[Any]) -> None:
    syncer = SyncerThread(config(adopt=adopt))
    parts.append(syncer)
    learners = [TrainingThread(syncer.address, f"l{i}", seed=i, steps=60) for i in range(2)]
    parts += learners
    for learner in learners:
        learner.thread.join(60)
        assert learner.error is None
    syncer.wait_for(lambda shell: not shell.machine.book.in_flight, "rest")
    stats = syncer.check_ledger()
    assert stats["tokens_processed"] == 2 * 60 * 32
    assert stats["tokens_pending"] == 0
    if adopt == "rebase":
        assert stats["tokens_merged"] == stats["tokens_processed"]
    if adopt == "overwrite":
        assert set(stats["tokens_discarded"]) <= {"overwritten", "stale"}


def test_a_token_budget_ends_the_run(parts: list[Any]) -> None:
    syncer = SyncerThread(config(tokens_budget=2 * 40 * 32))
    parts.append(syncer)
    learners = [TrainingThread(syncer.address, f"l{i}") for i in range(2)]
    parts += learners
    for learner in learners:
        learner.thread.join(60)
        assert not learner.thread.is_alive() and learner.error is None
    assert sum(learner.taken for learner in learners) >= 80
    syncer.wait_for(lambda shell: shell.finished.is_set(), "the end")
    assert syncer.check_ledger()["tokens_merged"] == sum(learner.taken for learner in learners) * 32


def test_a_learner_ten_times_slower_still_contributes(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(), folder=tmp_path)
    parts.append(syncer)
    fast = TrainingThread(syncer.address, "fast", step_s=0.02)
    slow = TrainingThread(syncer.address, "slow", step_s=0.2)
    parts += [fast, slow]
    slow.wait_steps(25)
    for learner in (fast, slow):
        learner.stop()
    syncer.check_ledger()
    syncer.stop()
    commits = [e for _, _, e in read_events(tmp_path) if isinstance(e, events.Committed)]
    by_fragment = {c.fragment for c in commits if "slow" in c.contributors}
    assert by_fragment == {0, 1, 2, 3}
    assert fast.taken > 3 * slow.taken


def test_a_link_too_thin_for_the_grace_window_is_carried_not_wasted(parts: list[Any], tmp_path: Path) -> None:
    """fp32 contributions of about 0.3 MB over 0.5 MB/s: each takes many steps to arrive, long after the quorum."""
    syncer = SyncerThread(config(codec_up="fp32", quorum="1", sync_every=8, grace_cap_steps=0.5), folder=tmp_path)
    proxy = Proxy(syncer.address, bytes_per_s=500_000)
    parts += [syncer, proxy]
    fast = TrainingThread(syncer.address, "fast", model=small_model(4000), step_s=0.05)
    thin = TrainingThread(proxy.address, "thin", model=small_model(4000), step_s=0.05)
    parts += [fast, thin]

    def carried(shell: Any) -> bool:
        return bool(shell.machine.book.contributions_late >= 3)

    syncer.wait_for(carried, "late contributions")
    syncer.wait_for(lambda shell: shell.machine.book.contributions_late >= 5, "more late contributions")
    for learner in (fast, thin):
        learner.stop()
        assert learner.error is None
    stats = syncer.check_ledger()
    assert stats["tokens_discarded"] == {}
    syncer.stop()
    all_events = [e for _, _, e in read_events(tmp_path)]
    merged = [e for e in all_events if isinstance(e, events.Committed) and "thin" in e.contributors]
    late = [e for e in all_events if isinstance(e, events.ContributionReceived) and e.learner == "thin" and e.late]
    assert late and len(merged) >= 3


def test_a_link_far_too_thin_for_the_run_still_contributes_at_its_own_pace(parts: list[Any], tmp_path: Path) -> None:
    """The run publishes some 50 kB a second of updates, and the link carries 10: what it cannot have in time must not
    stand in front of what it can. The others do not notice."""
    link_bytes_s = 10_000
    syncer = SyncerThread(config(fragments=1, sync_every=8, learners_expected=2), folder=tmp_path)
    proxy = Proxy(syncer.address, bytes_per_s=link_bytes_s)
    parts += [syncer, proxy]
    fat = [TrainingThread(syncer.address, f"fat-{i}", model=small_model(400), step_s=0.03, seed=i) for i in range(2)]
    parts += fat
    syncer.wait_for(reaches(2), "two versions")
    thin = TrainingThread(proxy.address, "thin", model=small_model(400), step_s=0.03, seed=7, run_folder=tmp_path)
    parts.append(thin)

    def merged(shell: Any) -> int:
        member = shell.machine.membership.members.get("thin")
        return max((seq for seq, _ in member.merged[0]), default=-1) + 1 if member is not None else 0

    syncer.wait_for(lambda shell: merged(shell) >= 2, "two contributions over the thin link")
    assert thin.error is None
    stamped = [(t_ns, e) for t_ns, _, e in read_events(tmp_path)]
    commits = [(t_ns, e) for t_ns, e in stamped if isinstance(e, events.Committed)]
    published_bytes_s = sum(e.update_bytes for _, e in commits) * 1e9 / (commits[-1][0] - commits[0][0])
    if published_bytes_s > 3 * link_bytes_s:  # on a machine that is too busy for such a run the link is not too thin
        assert "thin" in [e.learner for _, e in stamped if isinstance(e, events.MemberAside) and e.aside]


def test_the_syncer_names_a_link_that_carries_reports_and_no_contribution(
    parts: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """130 kB at 1.5 kB/s: in the 87 s until the first one is here somebody should know why it is set aside."""
    monkeypatch.setenv("ATOLL_LEAVE_S", "5")  # over such a link it would try for three minutes
    monkeypatch.setattr(platform, "THIN_LOOK_S", 1.0)
    syncer = SyncerThread(config(fragments=1, sync_every=8, learners_expected=2), folder=tmp_path)
    proxy = Proxy(syncer.address, bytes_per_s=1500, ways=("up",))
    parts += [syncer, proxy]
    parts += [TrainingThread(syncer.address, f"fat-{i}", model=small_model(4000), step_s=0.05) for i in range(2)]
    syncer.wait_for(reaches(1), "a version")
    parts.append(TrainingThread(proxy.address, "thin", model=small_model(4000), step_s=0.05))

    def said() -> list[events.LinkThin]:
        return [e for _, _, e in read_events(tmp_path) if isinstance(e, events.LinkThin)]

    syncer.wait_for(lambda shell: any(said()), "the syncer says so")
    assert ("thin", "up", 0.0) in [(e.learner, e.direction, e.gets_bytes_s) for e in said()]


def test_nobody_fetches_the_first_parameters_where_all_begin_with_the_same(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(), folder=tmp_path)
    parts.append(syncer)
    same = [TrainingThread(syncer.address, f"same-{i}", step_s=0.2, run_folder=tmp_path) for i in range(2)]
    parts += same
    syncer.wait_for(lambda shell: len(shell.machine.membership.active()) == 2, "two learners")
    other = small_model()
    with torch.no_grad():
        other[0].bias.add_(1.0)  # type: ignore[operator, union-attr]
    third = TrainingThread(syncer.address, "other", model=other, step_s=0.2, run_folder=tmp_path)
    parts.append(third)
    syncer.wait_for(lambda shell: len(shell.machine.membership.active()) == 3, "a third one")
    for learner in (*same, third):
        learner.stop()
    fetched = [e for _, _, e in read_events(tmp_path) if isinstance(e, events.LearnerFetched) and e.version == 0]
    assert {e.learner for e in fetched if e.bytes == 0} >= {"same-0", "same-1"}
    assert any(e.learner == "other" and e.bytes > 0 for e in fetched) or max(versions(syncer)) > 0


def test_training_goes_on_while_the_syncer_is_away_for_ten_seconds(parts: list[Any]) -> None:
    syncer = SyncerThread(config())
    proxy = Proxy(syncer.address)
    parts += [syncer, proxy]
    learners = [TrainingThread(proxy.address, f"l{i}", seed=i, step_s=0.02) for i in range(2)]
    parts += learners
    syncer.wait_for(reaches(2), "two versions")
    proxy.cut()
    before = [learner.taken for learner in learners]
    time.sleep(10)
    assert all(learner.taken > b + 100 for learner, b in zip(learners, before, strict=True))
    stuck = versions(syncer)
    proxy.mend()
    syncer.wait_for(reaches(max(stuck) + 3), "new versions after the link came back")
    for learner in learners:
        learner.stop()
        assert learner.error is None
    stats = syncer.check_ledger()
    assert stats["tokens_processed"] == sum(learner.taken for learner in learners) * 32
    assert stats["tokens_discarded"] == {}


def test_a_syncer_that_is_at_another_address_now_is_found_there_with_its_payloads(parts: list[Any]) -> None:
    syncer = SyncerThread(config(fragments=1, codec_up="fp32", codec_down="fp32", learners_expected=1))
    here, there = Proxy(syncer.address), Proxy(syncer.address)
    parts += [syncer, here, there]
    model = small_model(1024)  # too large for the control connection
    learner = TrainingThread(f"{here.address},{there.address}", "l0", step_s=0.02, model=model)
    parts.append(learner)
    syncer.wait_for(reaches(2), "two versions")
    assert there.moved == {"up": 0, "down": 0}
    here.cut()
    before = max(versions(syncer))
    syncer.wait_for(reaches(before + 3), "new versions by way of the other address")
    assert min(there.moved.values()) > 250_000
    learner.stop()
    assert learner.error is None
    syncer.check_ledger()


def test_a_late_joiner_starts_at_the_runs_step_with_its_parameters(parts: list[Any]) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    first = TrainingThread(syncer.address, "first")
    parts.append(first)
    syncer.wait_for(reaches(5), "five versions")
    joiner = TrainingThread(syncer.address, "joiner")
    parts.append(joiner)
    joiner.wait_steps(30)
    assert joiner.learner.start_step >= 16
    assert min(joiner.learner.versions()) >= 5
    for learner in (first, joiner):
        learner.stop()
    syncer.check_ledger()


def test_two_learners_with_one_id_the_newer_one_stays(parts: list[Any]) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    other = TrainingThread(syncer.address, "other")
    old = TrainingThread(syncer.address, "twin")
    parts += [other, old]
    old.wait_steps(10)
    new = TrainingThread(syncer.address, "twin")
    parts.append(new)
    new.wait_steps(10)
    old.thread.join(60)
    assert isinstance(old.error, FencedError) and "its own id" in str(old.error)
    new.wait_steps(10)
    assert new.learner.generation == 2
    for learner in (other, new):
        learner.stop()
        assert learner.error is None
    syncer.check_ledger()


def test_a_learner_that_goes_nan_is_reseeded_and_never_merged(parts: list[Any], tmp_path: Path) -> None:
    syncer = SyncerThread(config(), folder=tmp_path)
    parts.append(syncer)
    good = TrainingThread(syncer.address, "good", run_folder=tmp_path)
    bad = TrainingThread(syncer.address, "bad", run_folder=tmp_path)
    parts += [good, bad]
    bad.wait_steps(10)
    real, bad.train = bad.train, lambda: [p.data.fill_(float("nan")) for p in bad.model.parameters()]  # type: ignore[method-assign]
    bad.wait_steps(12)
    bad.train = real  # type: ignore[method-assign]
    bad.wait_steps(20)
    for learner in (good, bad):
        learner.stop()
        assert learner.error is None
    assert all(bool(torch.isfinite(p).all()) for p in bad.model.parameters())
    assert syncer.check_ledger()["tokens_discarded"].get("quarantined", 0) > 0
    state = syncer.ask(lambda shell: shell.state)
    assert all(bool(torch.isfinite(torch.from_numpy(a.theta)).all()) for a in state.fragments)
    syncer.stop()
    assert any(isinstance(e, events.Warned) and "re-seeded" in e.text for _, _, e in read_events(tmp_path))


def test_a_syncer_that_restarts_empty_goes_on_with_the_run_that_the_learner_holds(parts: list[Any]) -> None:
    syncer = SyncerThread(config(), run="before")
    parts.append(syncer)
    learner = TrainingThread(syncer.address, "only")
    parts.append(learner)
    syncer.wait_for(reaches(3), "three versions")
    syncer.stop()
    learner.wait_steps(50)
    held = learner.learner.versions()
    again = SyncerThread(config(), listen=syncer.address, run="after")
    parts.append(again)
    again.wait_for(reaches(max(held) + 2), "the versions count on")
    assert again.ask(lambda shell: shell.machine.run) == "before"
    learner.stop()
    assert learner.error is None
    again.check_ledger()


# ---------------------------------------------------------------- models of every kind


class Odd(nn.Module):
    """Tied weights, a frozen part, a buffer, a scalar, bf16 parameters, a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 32)
        self.frozen = nn.Linear(32, 32)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(32)
        self.half = nn.Linear(32, 32).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize("adopt", ["rebase", "overwrite", "mix:0.5"])
def test_tied_frozen_bf16_scalar_and_channels_last_parameters(adopt: str, parts: list[Any]) -> None:
    syncer = SyncerThread(config(adopt=adopt, fragments=3, codec_up="fp32", codec_down="fp32"))
    parts.append(syncer)
    learners = [
        TrainingThread(syncer.address, f"l{i}", model=Odd(), seed=i, copies_on_device=bool(i)) for i in range(2)
    ]
    for learner in learners:
        learner.train = lambda module=learner.model: nudge(module)  # type: ignore[misc,method-assign]
    parts += learners
    syncer.wait_for(reaches(6), "six versions")
    tensors = syncer.ask(lambda shell: shell.machine.layout.tensors)
    names = {t.name: t for t in tensors}
    assert "head.weight" not in names and names["embedding.weight"].merge == "mean"
    assert not any(name.startswith("frozen") for name in names)
    assert names["half.weight"].dtype == "bfloat16" and names["scale"].shape == (1,)
    for learner in learners:
        learner.stop()
        assert learner.error is None
    syncer.check_ledger()


def test_a_learner_that_mixes_with_1_keeps_its_own_parameters_to_the_bit() -> None:
    model = small_model().to(torch.bfloat16)
    model[2].to(torch.float32)  # type: ignore[index]
    parameters = laid_out(model, 1)
    before = parameters.save()
    other = torch.randn(parameters.layout.fragments[0].size).numpy()
    parameters.mix(0, parameters.stage(0, partial(into, other)), 1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def laid_out(model: nn.Module, fragments: int) -> TorchParameters:
    parameters = TorchParameters(model)
    parameters.lay_out(build_layout(parameters.specs, fragments))
    return parameters


def nudge(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data += 0.01 * torch.randn_like(parameter)


@pytest.mark.parametrize("on_device", [False, True])
def test_global_params_swaps_the_published_model_in_and_back(on_device: bool, parts: list[Any]) -> None:
    syncer = SyncerThread(config())
    parts.append(syncer)
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"address": syncer.address, "learner_id": "l", "copies_on_device": on_device}
    with Learner(model, optimizer, **options) as learner:
        for _ in range(20):
            nudge(model)
            learner.step(tokens=1)
            time.sleep(0.01)
        local = [p.detach().clone() for p in model.parameters()]
        with learner.global_params():
            inside = [p.detach().clone() for p in model.parameters()]
            vault = learner._shell.vault
            assert vault is not None and vault.current[0] is not None
            assert np.array_equal(learner._parameters.read(0).values(), vault.current[0].theta)
        assert all(torch.equal(a, b) for a, b in zip(local, model.parameters(), strict=True))
        assert any(not torch.equal(a, b) for a, b in zip(local, inside, strict=True))


# ---------------------------------------------------------------- bad input


def test_bad_arguments_have_clear_errors(parts: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_SYNCER", raising=False)
    model = small_model()
    with pytest.raises(ConfigError, match="atoll run"):
        Learner(model)
    with pytest.raises(ConfigError, match="trainable"):
        Learner(nn.Linear(2, 2).requires_grad_(False), address="127.0.0.1:1")
    with pytest.raises(ConfigError, match="merge_modes names 'nope'"):
        Learner(model, address="127.0.0.1:1", merge_modes={"nope": "mean"})
    with pytest.raises(UnreachableError, match=r"after 3 s: connection refused at 127\.0\.0\.1:1: .* start it with"):
        Learner(model, address="127.0.0.1:1", join_timeout_s=3.0).start()
    syncer = SyncerThread(config(), token="right")
    parts.append(syncer)
    with pytest.raises(RefusedError, match="token"):
        Learner(model, address=syncer.address, token="wrong", join_timeout_s=20).start()
    with Learner(model, address=syncer.address, token="right", learner_id="l") as learner:
        for tokens in (0, -5, True, 1.5):
            with pytest.raises(ConfigError, match="at least 1"):
                learner.step(tokens=tokens)  # type: ignore[arg-type]
        learner.step(tokens=1)
        with pytest.raises(RefusedError, match="same model"):
            Learner(small_model(64), address=syncer.address, token="right", learner_id="m").start()
        learner.step(tokens=1)


def test_more_fragments_than_the_model_can_fill_is_refused(parts: list[Any]) -> None:
    syncer = SyncerThread(config(fragments=100))
    parts.append(syncer)
    with pytest.raises(RefusedError, match="--fragments"):
        Learner(small_model(), address=syncer.address).start()


@pytest.mark.parametrize("width", [64, 16_000])  # updates that come with their notice, and updates that are fetched
def test_values_that_could_not_be_prepared_are_made_by_the_adopt(
    width: int, parts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU without memory to spare between two steps: training and merging go on."""
    stage, refused = TorchParameters.stage, []

    def short_of_memory(parameters: TorchParameters, fragment: int, make: Any) -> Any:
        if threading.current_thread().name.startswith("atoll-"):  # the link's, or one that encodes
            refused.append(fragment)
            raise torch.OutOfMemoryError("not in the background")
        return stage(parameters, fragment, make)

    syncer = SyncerThread(config())
    parts.append(syncer)
    learners: list[TrainingThread] = []
    monkeypatch.setattr(TorchParameters, "stage", short_of_memory)
    for i in range(2):
        learners.append(TrainingThread(syncer.address, f"l{i}", seed=i, model=small_model(width)))
    parts += learners
    syncer.wait_for(reaches(6), "six versions of every fragment")
    for learner in learners:
        learner.stop()
        assert learner.error is None
    assert refused
    syncer.wait_for(lambda shell: not shell.machine.book.in_flight, "rest")
    stats = syncer.check_ledger()
    assert stats["tokens_merged"] == stats["tokens_processed"]


def test_snapshots_keep_the_padding_zero_whatever_fragment_came_before() -> None:
    """Fragments of equal size whose slices end at different places must not share buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, 10))
    parameters = laid_out(model, 4)
    for _ in range(2):
        for fragment in parameters.layout.fragments:
            snapshot = parameters.read(fragment.index)
            values = snapshot.values()
            used = torch.zeros(fragment.size, dtype=torch.bool)
            for piece in fragment.slices:
                used[piece.offset : piece.offset + piece.size] = True
            assert not values[~used.numpy()].any()
            parameters.release(snapshot)
