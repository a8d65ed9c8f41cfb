from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.config import SyncConfig, parse_adopt, parse_quorum
from atoll.core.ledger import Ledger, apportion
from atoll.core.messages import DiscardCount
from atoll.core.policy import (
    LearnerNorm,
    clock_step,
    contribution_weight,
    first_due_step,
    fragments_for,
    grace_ns,
    norm_limit,
    quorum_count,
    round_steps,
    upcoming_steps,
    with_norm,
)
from atoll.errors import ConfigError

MS = 1_000_000


def test_quorum_is_a_number_a_share_or_all() -> None:
    assert quorum_count(SyncConfig(quorum="3", learners_expected=8), 8, 8) == 3
    half = SyncConfig(quorum="50%", learners_expected=4)
    assert [quorum_count(half, n, 4) for n in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    everybody = SyncConfig(quorum="all", learners_expected=4)
    assert quorum_count(everybody, 1, 1) == 4, "until all have joined once, all means all that are expected"
    assert quorum_count(everybody, 3, 4) == 3, "afterwards it means all that are active"


@given(st.lists(st.integers(0, 1000), max_size=9), st.integers(1, 9))
def test_the_clock_is_the_kth_largest_step(steps: list[int], quorum: int) -> None:
    clock = clock_step(sorted(steps), quorum)
    if len(steps) < quorum:
        assert clock is None
    else:
        assert clock is not None and sum(step >= clock for step in steps) >= quorum
        assert sum(step > clock for step in steps) < quorum


def test_first_launches_are_staggered_over_one_period() -> None:
    config = SyncConfig(sync_every=24, fragments=8)
    assert [first_due_step(config, p) for p in range(8)] == [3, 6, 9, 12, 15, 18, 21, 24]
    assert first_due_step(SyncConfig(sync_every=5, fragments=1), 0) == 5
    assert first_due_step(SyncConfig(sync_every=1, fragments=8), 0) == 1


def test_grace_uses_only_slack_and_never_more_than_its_cap() -> None:
    config = SyncConfig(overlap=2, grace_cap_steps=1.0, grace_gamma=0.8)
    assert grace_ns(config, 100 * MS, 120 * MS, 20 * MS, 2.0) == (48 * MS, "slack")
    assert grace_ns(config, 100 * MS, 1 * MS, 1 * MS, 2.0) == (100 * MS, "cap")
    assert grace_ns(config, 100 * MS, 300 * MS, 0, 2.0) == (75 * MS, "late")
    assert grace_ns(config, 100 * MS, 900 * MS, 0, 2.0) == (100 * MS, "cap")
    assert grace_ns(config, 100 * MS, 0, 300 * MS, 2.0) == (0, "no slack")
    assert grace_ns(SyncConfig(grace_gamma=0.0), 100 * MS, 300 * MS, 0, 2.0) == (0, "no slack")
    assert grace_ns(SyncConfig(grace_cap_steps=0.0), 100 * MS, 0, 0, 2.0) == (0, "grace is off")
    assert grace_ns(SyncConfig(overlap=0), 100 * MS, 0, 0, 8.0)[0] == 0


def test_a_round_has_the_time_until_the_next_one_waits_for_it() -> None:
    one, many = SyncConfig(sync_every=8, fragments=1), SyncConfig(sync_every=8, fragments=24)
    assert [round_steps(c.fragments, 8, c.rounds_in_flight_max) for c in (one, many)] == [8.0, 2.0]
    assert grace_ns(one, 100 * MS, 400 * MS, 0, 8.0) == (100 * MS, "cap")  # answers take twice tau


def test_a_quorum_of_late_ones_waits_as_long_as_answers_usually_take() -> None:
    config = SyncConfig(overlap=2)
    assert grace_ns(config, 100 * MS, 400 * MS, 0, 8.0, carried=True)[0] == 500 * MS
    assert grace_ns(config, 100 * MS, 400 * MS, 0, 2.0, carried=True)[0] == 500 * MS
    assert grace_ns(config, 100 * MS, 500 * MS, 0, 2.0, carried=True) == (100 * MS, "cap")
    assert grace_ns(config, 100 * MS, 0, 300 * MS, 2.0, carried=True) == (0, "no slack")


def test_weights() -> None:
    assert contribution_weight(SyncConfig(), 4, 400, 0) == 40_000
    assert contribution_weight(SyncConfig(weights="tokens"), 4, 400, 0) == 400
    assert contribution_weight(SyncConfig(weights="uniform"), 4, 400, 3) == 1
    assert contribution_weight(SyncConfig(weights="tokens", age_discount=0.5), 4, 400, 2) == 100


def test_the_norm_guard_needs_history_and_allows_for_long_absences() -> None:
    config = SyncConfig(sync_every=10, norm_outlier_factor=10.0)
    assert norm_limit(config, [1.0] * 7, 10) == math.inf
    assert norm_limit(config, [1.0] * 20, 10) == 10.0
    assert norm_limit(config, [1.0] * 20, 50) == 50.0
    assert norm_limit(config, [0.0] * 20, 10) == math.inf


def test_what_a_short_contribution_tells_about_the_usual_norm() -> None:
    config = SyncConfig(sync_every=10, norm_outlier_factor=10.0)
    known = [("a", 1.0)]
    assert with_norm(config, known, "b", 0.01, 4) == known, "less than half of a period tells nothing"
    assert with_norm(config, known, "b", 3.0, 5) == [*known, ("b", 6.0)], "half of a period counts as if it had gone on"
    assert with_norm(config, known, "b", 3.0, 30) == [*known, ("b", 3.0)]
    assert len(with_norm(config, known * 500, "a", 1.0, 10)) == 33


def test_whoever_is_merged_more_often_than_the_others_has_one_voice() -> None:
    config, norms = SyncConfig(sync_every=10, norm_outlier_factor=10.0), []
    for _ in range(40):
        for learner, norm in (("a", 1.0), ("b", 1.0), ("liar", 1e-9), ("liar", 1e-9), ("liar", 1e-9)):
            norms = with_norm(config, norms, learner, norm, 10)
    assert norm_limit(config, [norm for _, norm in norms], 10) == 10.0


def test_one_of_three_that_brings_next_to_nothing_has_nobody_refused() -> None:
    config, norms = SyncConfig(sync_every=10, norm_outlier_factor=10.0), []
    for _ in range(40):
        for learner, norm in (("short", 1.0), ("long", 12.0), ("liar", 1e-18)):
            norms = with_norm(config, norms, learner, norm, 10)
    assert norm_limit(config, [norm for _, norm in norms], 10) == 120.0, "it was 10, and the longer one was refused"
    assert norm_limit(config, [1.0] * 11 + [10.0] * 11 + [1e-18] * 11, 10) == 100.0, "never past ten times the longest"


def test_a_warm_up_is_no_outlier() -> None:
    """The learning rate rises with the step, and an update is as long as the rates of its steps together. Fragments
    take turns: each first contribution is of 1 to 24 steps, all others are of 24."""
    config = SyncConfig(sync_every=24, norm_outlier_factor=10.0)
    for first in range(1, 25):
        norms: list[LearnerNorm] = []
        begin, end = 0, first
        for _ in range(20):
            norm = float(sum(range(begin + 1, end + 1)))
            assert norm <= norm_limit(config, [known for _, known in norms], end - begin)
            for number in range(8):
                norms = with_norm(config, norms, f"l{number}", norm, end - begin)
            begin, end = end, end + 24


def test_a_slow_learner_keeps_more_snapshots() -> None:
    assert upcoming_steps(100, 100) == upcoming_steps(20, 100) == upcoming_steps(100, 0) == 2
    assert upcoming_steps(1000, 100) == 11


def test_small_models_get_fewer_fragments() -> None:
    assert [fragments_for(n, 100) for n in (1, 70_000, 460_000, 2_000_000, 10**11)] == [1, 1, 7, 24, 24]
    assert [fragments_for(10**11, every) for every in (1, 8, 24, 25)] == [1, 8, 24, 24]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"quorum": "5", "learners_expected": 4}, "quorum 5 is above the 4 learners"),
        ({"quorum": "none"}, "quorum must be"),
        ({"quorum": "0"}, "quorum must be"),
        ({"quorum": "150%"}, "quorum must be"),
        ({"adopt": "mix:2"}, "adopt must be"),
        ({"adopt": "mix:0"}, "adopt must be rebase, overwrite or mix:ALPHA with 0 < ALPHA <= 1"),
        ({"adopt": "merge"}, "adopt must be"),
        ({"codec_up": "int3"}, "codec_up is 'int3', which is no codec .*choose one of fp32, bf16, int8, int4, int2"),
        ({"merge": "median"}, "merge is 'median', which is no merge method"),
        ({"weights": "luck"}, "weights must be one of"),
        ({"sync_every": 0}, "sync_every must be a whole number from 1"),
        ({"sync_every": 2.5}, "sync_every must be int"),
        ({"sync_every": True}, "sync_every must be int"),
        ({"outer_lr": float("nan")}, "outer_lr must be a number"),
        ({"outer_momentum": 1.5}, "outer_momentum must be a number"),
        ({"speed": 3}, "unknown setting 'speed'; known settings are"),
    ],
)
def test_bad_settings_say_what_is_allowed(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SyncConfig.from_dict(values)


def test_settings_survive_a_round_trip() -> None:
    config = SyncConfig(quorum="75%", adopt="mix:0.25", outer_lr=1)
    assert SyncConfig.from_dict(config.to_dict()) == config
    assert parse_quorum("75%") == (0, 0.75) and parse_adopt(config.adopt) == ("mix", 0.25)
    assert parse_adopt("mix:1") == ("mix", 1.0)


def test_rounds_in_flight() -> None:
    assert SyncConfig(sync_every=24, fragments=24, overlap=2).rounds_in_flight_max == 2
    assert SyncConfig(sync_every=24, fragments=1, overlap=2).rounds_in_flight_max == 1
    assert SyncConfig(sync_every=2, fragments=8, overlap=0).rounds_in_flight_max == 4


# ---------------------------------------------------------------- the ledger

moves = st.lists(
    st.tuples(
        st.sampled_from(["report", "hold", "merge", "release", "discard", "gone", "back", "retire"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(0, 50),
    ),
    max_size=60,
)


@given(moves)
def test_the_ledger_adds_up_after_any_sequence_of_reports(sequence: list[tuple[str, int, int, int]]) -> None:
    ledger = Ledger([100, 37, 1])
    held: dict[tuple[int, int], list[int]] = {}
    tokens, discards = [0, 0, 0], {}
    generation = [1, 1, 1]
    for what, who, fragment, amount in sequence:
        name, key = f"l{who}", (who, fragment)
        account = ledger.account(name, generation[who])
        if what == "report":
            tokens[who] += amount
            account.report(tokens[who], [])
        elif what == "discard":
            discards[key] = discards.get(key, 0) + amount
            account.report(tokens[who], [DiscardCount(fragment, "overwritten", discards[key])])
        elif what == "hold":
            ledger.hold(name, generation[who], fragment, amount)
            held.setdefault(key, []).append(amount)
        elif what in ("merge", "release") and held.get(key):
            getattr(ledger, what)(name, generation[who], fragment, held[key].pop())
        elif what in ("gone", "back"):
            ledger.set_gone(name, generation[who], what == "gone")
        elif what == "retire" and not any(held.get((who, f)) for f in range(3)):
            ledger.retire(name, generation[who])
            generation[who] += 1
            tokens[who] = 0
            discards = {k: v for k, v in discards.items() if k[0] != who}
        for index in range(3):
            line = ledger.fragment_totals(index)
            assert line.processed == line.merged + line.pending + sum(line.discarded.values())
            assert min(line.merged, line.pending, *line.discarded.values(), 0) == 0
        total = ledger.totals()
        assert total.processed == total.merged + total.pending + sum(total.discarded.values())


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 10**12), min_size=1, max_size=6), st.integers(1, 10**6))
def test_apportion_is_exact(fragment_records: dict[str, int], divisor: int) -> None:
    total = sum(fragment_records.values()) // divisor
    shares = apportion(fragment_records, total, divisor)
    assert sum(shares.values()) == total
    assert all(0 <= shares[name] - fragment_records[name] // divisor <= 1 for name in fragment_records)
