"""The controller of `adaptive`: what it decides, that it does not flap, and that nonsense moves nothing."""

from __future__ import annotations

import math
from collections import Counter
from itertools import count
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.adaptive import WINDOW_NS_MIN, AdaptiveController, RunMeasured
from atoll.core.change_budget import CHANGE_EVERY_NS, CHANGES_BURST
from atoll.core.codec_ladder import ladder_down, ladder_of
from atoll.core.config import CODECS, SECOND_NS, SyncConfig
from atoll.core.events import Adapted
from atoll.core.link_ladder import LinkPlace, next_rung
from atoll.core.link_use import LinkMeasured, LinkWatch
from atoll.errors import ConfigError

KNOWS = frozenset(CODECS.names())
CALM = RunMeasured(step_ns=1e8, round_ns=1e7, fragments=4)
HOUR_NS = 3600 * SECOND_NS
ROUNDS = count(1)
OTHERS = ("rome", "oslo")
"""Behind fat links."""
ALL = [("paris", KNOWS), *((name, KNOWS) for name in OTHERS)]


def controller(**changes: object) -> AdaptiveController:
    return AdaptiveController(SyncConfig(**{"adaptive": "network", "fragments": 4, **changes}))  # type: ignore[arg-type]


def window(
    made: AdaptiveController, now_ns: int, busy: float, run: RunMeasured = CALM, answers: int = 4
) -> list[Adapted]:
    """A window in which paris was asked, and took this share of the time to answer."""
    long_ns = WINDOW_NS_MIN
    for turn in range(answers):
        start_ns = now_ns + turn * long_ns // answers
        number = next(ROUNDS)
        made.links.asked("paris", 0, number, start_ns)
        made.links.answered("paris", 0, number, 1000, start_ns + int(busy * long_ns / answers))
        for name in OTHERS:
            made.links.asked(name, 0, number, start_ns)
            made.links.answered(name, 0, number, 1000, start_ns + 1_000_000)
    return made.look(now_ns + long_ns, 100, run, ALL)


def windows(made: AdaptiveController, count: int, busy: float, start_ns: int = 0, **more: object) -> list[Adapted]:
    made.look(start_ns, 0, CALM, ALL)
    changes: list[Adapted] = []
    for turn in range(count):
        changes += window(made, start_ns + turn * WINDOW_NS_MIN, busy, **more)  # type: ignore[arg-type]
    return changes


def test_a_thin_link_sends_fewer_bits_and_the_reason_names_the_numbers() -> None:
    """An answer is wanted every 200 ms. Of four in three seconds each takes 712: with topk:10% it would be 189, too
    long, with topk:3% 65."""
    made = controller()
    (first,) = windows(made, 1, 0.95)
    assert (first.subject, first.what, first.before, first.after) == ("paris", "codec_up", "int4", "topk:3%")
    assert first.reason == "it takes 712 ms for each answer, and there are 200 for it"
    assert made.codec("paris") == "topk:3%" and made.codec("rome") == "int4" and made.codec("lyon") == ""


def test_a_link_that_lacks_little_goes_down_one_rung() -> None:
    (first,) = windows(controller(), 1, 0.3)
    assert first.after == "int2"


def test_a_link_with_room_goes_back_at_once_as_far_as_it_fits_but_not_soon() -> None:
    made = controller()
    windows(made, 1, 0.95)
    changes = windows(made, 2, 0.005, start_ns=10 * SECOND_NS)
    assert not changes
    changes = windows(made, 4, 0.005, start_ns=20 * SECOND_NS)
    assert [(c.before, c.after) for c in changes] == [("topk:3%", "int4")]
    assert "has room" in changes[0].reason


def test_fewer_bits_that_do_not_help_are_given_back_and_not_tried_again_soon() -> None:
    """A link that is slow for another reason than bytes: with a tenth of them it answers as seldom."""
    made = controller()
    changes = windows(made, 30, 0.95)
    assert [(c.before, c.after) for c in changes] == [("int4", "topk:3%"), ("topk:3%", "int4")]
    assert "did not help" in changes[1].reason
    later = windows(made, 3, 0.95, start_ns=20 * 60 * SECOND_NS)
    assert later[0].after == "topk:3%", "but not for ever: its link may have thinned out while it was judged"


def test_what_was_under_way_when_it_was_decided_says_nothing_about_the_decision() -> None:
    """The last answer in int4 takes ten seconds, and each in topk 0.3 s."""
    made = controller(fragments=1)
    made.look(0, 0, CALM, ALL)
    made.links.asked("paris", 0, 1, 0)
    for name in OTHERS:
        made.links.asked(name, 0, 1, 0)
        made.links.answered(name, 0, 1, 1000, 1_000_000)
    run = RunMeasured(1e8, 1e7, 1)
    (change,) = made.look(WINDOW_NS_MIN, 5, run, ALL)
    assert change.after == "topk:3%" and "no answer for 3.0 s" in change.reason
    assert not made.look(2 * WINDOW_NS_MIN, 5, run, ALL)
    made.links.answered("paris", 0, 1, 1000, 10 * SECOND_NS)
    now_ns = 10 * SECOND_NS
    for number in range(2, 8):
        made.links.asked("paris", 0, number, now_ns)
        made.links.answered("paris", 0, number, 1000, now_ns + 3 * SECOND_NS // 10)
        now_ns += SECOND_NS
        assert not made.look(now_ns, 5, run, ALL)
    assert made.codec("paris") == "topk:3%"


def test_a_link_that_is_too_thin_for_the_last_rung_contributes_at_its_own_pace() -> None:
    made = controller()
    windows(made, 1, 0.95, answers=1)
    changes = windows(made, 5, 0.95, start_ns=3 * WINDOW_NS_MIN, answers=3)
    assert not changes and made.codec("paris") == "topk:3%", "there are no fewer bits"


def test_answers_that_come_soon_are_not_blamed_on_bits() -> None:
    busy = RunMeasured(step_ns=1e6, round_ns=1e5, fragments=4)  # one is wanted every two ms
    assert not windows(controller(), 5, 0.95, run=busy, answers=200)  # 15 ms each


def test_an_answer_without_bytes_says_nothing_about_a_link() -> None:
    watch = LinkWatch()
    watch.asked("paris", 0, 1, 0)
    watch.answered("paris", 0, 1, 0, 10**9)
    assert watch.take("paris", 10**9) == LinkMeasured(0, 0, skipped=1)


def test_rounds_that_do_not_fit_take_more_steps_in_hiding_then_a_longer_period() -> None:
    made = controller(sync_every=8, overlap=1)
    late = RunMeasured(step_ns=1e8, round_ns=4e8, fragments=4)
    changes = windows(made, 4, 0.1, run=late)
    assert [(c.what, c.before, c.after) for c in changes[:1]] == [("period", "8", "12")] or changes[0].what == "overlap"
    assert all("all rounds need" in c.reason for c in changes)
    assert made.period <= 64 and made.in_flight_max >= 1


def test_the_period_stays_while_somebody_can_send_fewer_bits() -> None:
    made = controller()
    late = RunMeasured(step_ns=1e8, round_ns=2e9, fragments=4)
    changes = windows(made, 1, 0.95, run=late, answers=2)
    assert {c.what for c in changes} == {"codec_up"}


def test_the_period_comes_back_when_rounds_are_quick_again() -> None:
    made = controller(overlap=0, quorum="all")
    windows(made, 3, 0.1, run=RunMeasured(step_ns=1e8, round_ns=4e9, fragments=1))
    assert made.period > 8
    windows(made, 400, 0.1, start_ns=HOUR_NS, run=RunMeasured(step_ns=1e8, round_ns=1e6, fragments=1))
    assert made.period == 8


def test_the_period_stays_within_its_bounds() -> None:
    made = controller(period_max=10)
    windows(made, 2000, 0.1, run=RunMeasured(step_ns=1e8, round_ns=1e12, fragments=4))
    assert made.period == 10


@pytest.mark.parametrize("bad", [math.nan, 0.0, -1.0, math.inf])
@pytest.mark.parametrize("field", ["step_ns", "round_ns"])
def test_numbers_that_cannot_be_move_nothing_and_are_said_once(bad: float, field: str) -> None:
    made = controller()
    wrong = RunMeasured(**{"step_ns": 1e8, "round_ns": 1e7, "fragments": 4, field: bad})  # type: ignore[arg-type]
    changes = windows(made, 5, 0.95, run=wrong)
    assert [(c.what, c.reason.partition(":")[0]) for c in changes] == [("nothing", "no decision")]
    assert made.codec("paris") in ("", "int4") and made.period == 8


@pytest.mark.parametrize("jump_ns", [-HOUR_NS, 10 * HOUR_NS])
def test_a_clock_that_jumps_moves_nothing(jump_ns: int) -> None:
    made = controller()
    windows(made, 1, 0.05)
    made.links.asked("paris", 0, next(ROUNDS), WINDOW_NS_MIN)
    (change,) = made.look(WINDOW_NS_MIN + jump_ns, 5, CALM, ALL)
    assert change.what == "nothing" and "passed at once" in change.reason
    assert made.codec("paris") in ("", "int4")
    assert windows(made, 1, 0.95, start_ns=WINDOW_NS_MIN + jump_ns), "and the next window counts again"


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_nothing_changes_more_often_than_its_bucket_allows_in_any_hour(seed: int) -> None:
    """Whatever is measured: links and rounds that jump from one end to the other."""
    dice, made, now_ns = Random(seed), controller(), 0
    told: list[tuple[int, Adapted]] = []
    for _ in range(2000):
        now_ns += int(dice.choice([1, 3, 10]) * WINDOW_NS_MIN)
        run = RunMeasured(1e8, dice.choice([1e6, 1e9, 1e11]), 4)
        busy, answers = dice.choice([0.0, 0.1, 0.5, 1.0]), dice.choice([1, 2, 30])
        told += [(now_ns, change) for change in window(made, now_ns, busy, run, answers)]
        now_ns += WINDOW_NS_MIN
    most = CHANGES_BURST + HOUR_NS // CHANGE_EVERY_NS
    for at_ns, _ in told:
        hour = Counter((c.subject, c.what) for t, c in told if at_ns <= t < at_ns + HOUR_NS)
        assert max(hour.values()) <= most


def test_off_decides_nothing_and_same_numbers_give_the_same_decisions() -> None:
    assert not windows(controller(adaptive="off"), 5, 1.0)
    assert controller(adaptive="off").in_flight_max == SyncConfig(fragments=4).rounds_in_flight_max
    assert windows(controller(), 9, 0.95) == windows(controller(), 9, 0.95)


def names(**settings: str) -> list[str]:
    return [name for name, _ in ladder_of(SyncConfig(**{"adaptive": "on", **settings}))]  # type: ignore[arg-type]


def test_a_ladder_begins_at_the_run_s_codec_and_has_fewer_bits_from_there_on() -> None:
    assert names() == ["int4", "int2", "topk:10%", "topk:3%"]
    assert names(codec_up="topk:5%") == ["topk:5%", "topk:3%"]
    assert names(adaptive="off") == ["int4"]
    assert names(codec_up="lowrank:4") == ["lowrank:4"], "its bits depend on shapes"
    assert names(codec_ladder="int8,lowrank:4,int4") == ["int8", "int4"]
    assert [round(bits, 3) for _, bits in ladder_of(SyncConfig(adaptive="on"))] == [4.125, 2.125, 1.094, 0.375]


def test_a_registered_codec_stands_where_its_bits_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Three:
        def size_max(self, n: int) -> int:
            return 3 * n // 8

    monkeypatch.setitem(CODECS._entries, "three", Three())
    assert names(codec_ladder="int2,three,int4") == ["int4", "three", "int2"]
    assert names(codec_up="three") == ["three", "int2", "topk:10%", "topk:3%"]


def test_a_fat_link_gets_more_bits_than_the_settings_only_where_a_ladder_says_so() -> None:
    assert not windows(controller(), 9, 0.01)
    made = controller(codec_ladder="int8,int4,int2")
    assert next((c.subject, c.before, c.after) for c in windows(made, 9, 0.01)) == ("paris", "int4", "int8")
    assert [(c.before, c.after) for c in windows(made, 1, 0.3, start_ns=HOUR_NS)] == [("int8", "int4")]


def test_a_build_that_does_not_know_a_rung_is_not_asked_for_it() -> None:
    made = controller()
    made.look(0, 0, CALM, [])
    for turn in range(3):
        made.links.asked("old", 0, 1, turn * WINDOW_NS_MIN)
        made.look((turn + 1) * WINDOW_NS_MIN, 1, CALM, [("old", frozenset())])
    assert made.codec("old") == ""
    link = LinkPlace((("int4", 4.0), ("int2", 2.0)), rung=1)
    assert next_rung(link, LinkMeasured(10**10, 1), 1e9, 0)[0] == 1


def test_time_that_runs_backwards_counts_as_none() -> None:
    watch = LinkWatch()
    watch.asked("paris", 0, 1, 100)
    watch.answered("paris", 0, 1, 5, 50)
    measured = watch.take("paris", 60)
    assert measured is not None and measured.busy_ns == 0 and measured.each_ns == 0.0
    assert watch.take("rome", 60) is None


def test_a_link_stays_in_use_while_a_newer_round_waits() -> None:
    watch = LinkWatch()
    watch.asked("paris", 0, 7, 0)
    watch.asked("paris", 0, 9, 40)
    watch.answered("paris", 0, 7, 5, 50)
    assert watch.take("paris", 100) == LinkMeasured(50, 1, waiting_ns=50, skipped=1)
    watch.answered("paris", 0, 9, 5, 110)
    assert watch.take("paris", 200) == LinkMeasured(60, 1)


def test_answers_of_several_fragments_share_a_link() -> None:
    watch = LinkWatch()
    for fragment in range(3):
        watch.asked("paris", fragment, 1 + fragment, 0)
    for fragment in range(3):
        watch.answered("paris", fragment, 1 + fragment, 5, 30)
    assert watch.take("paris", 50) == LinkMeasured(30, 3)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"period_min": 9, "period_max": 8}, "period_min 9 is above period_max 8"),
        ({"adaptive": "on", "sync_every": 2}, "sync_every 2, where it begins, is outside"),
        ({"adaptive": "on", "sync_every": 100}, "sync_every 100, where it begins, is outside"),
        ({"adaptive": "yes"}, "adaptive must be one of off, on, network, learning"),
        ({"codec_ladder": "int8,int2"}, "the run's codec_up int4 among them"),
        ({"codec_ladder": "int4,int5"}, "codec_ladder is 'int5', which is no codec"),
        ({"period_min": 0}, "period_min must be a whole number from 1"),
    ],
)
def test_bounds_that_exclude_each_other_are_refused(changes: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        SyncConfig(**changes)  # type: ignore[arg-type]


def test_what_was_decided_is_restored_from_its_row_and_said_again() -> None:
    made = controller(overlap=0, quorum="all")
    windows(made, 1, 0.95, answers=2)
    made.period = 12
    row = made.row()
    again = controller(overlap=0, quorum="all")
    again.restore(row, 77)
    assert (again.period, again.codec("paris"), again.decided) == (12, made.codec("paris"), True)
    told = again.look(0, 78, CALM, ALL)
    assert [(c.subject, c.after) for c in told] == [("run", "12"), ("paris", made.codec("paris"))]
    assert not controller().decided


def test_a_row_that_the_settings_no_longer_allow_for_is_passed_over() -> None:
    for row in ({}, {"period": 1000, "codecs": {"paris": "fp32"}}, {"period": "x", "codecs": {"paris": "none"}}):
        made = controller()
        made.restore(row, 5)
        assert not made.decided and made.codec("paris") == ""
    off = controller(adaptive="off")
    off.restore({"period": 12, "codecs": {"paris": "int2"}}, 5)
    assert off.period == 8


def all_thin(made: AdaptiveController, now_ns: int, takes_ns: int, run: RunMeasured) -> list[Adapted]:
    """A window in which each of three took so long for an answer."""
    for name, _ in ALL:
        number = next(ROUNDS)
        made.asked(name, 0, number, now_ns)
        made.links.answered(name, 0, number, 1000, now_ns + takes_ns)
    return made.look(now_ns + max(takes_ns, WINDOW_NS_MIN), 100, run, ALL)


def test_where_most_links_are_thin_nobody_leaves_values_out_and_the_period_grows_at_once() -> None:
    """An answer takes 2 s of a period of 0.8. In int2 it will take 1.03: into 12 steps of 0.1 s that fits."""
    made = controller(fragments=1)
    changes = all_thin(made, 0, 2 * SECOND_NS, RunMeasured(1e8, None, 1))
    assert [(c.subject, c.what, c.after) for c in changes] == [
        *((name, "codec_up", "int2") for name, _ in ALL),
        ("run", "codec_down", "int2"),
        ("run", "period", "11"),
    ]
    assert changes[-2].reason == "most uplinks are thin", "of downlinks nothing is known yet"
    assert changes[-1].reason == "all rounds need 1,030 ms of a period of 800"


def test_where_most_links_are_very_thin_values_are_left_out_once_the_period_is_three_times_as_long() -> None:
    """An answer takes 60 s in int4, and still 31 in int2. topk:3% takes 5.5."""
    made, now_ns, changes = controller(fragments=1), 0, list[Adapted]()
    for takes_s in (60, 31, 31, 31):
        changes += all_thin(made, now_ns, takes_s * SECOND_NS, RunMeasured(1e8, None, 1))
        now_ns += (takes_s + 3) * SECOND_NS
    assert ("period", "24") in [(c.what, c.after) for c in changes] and made.codec("paris") == "topk:3%"
    whats = [c.after for c in changes]
    assert whats.index("24") < whats.index("topk:3%")


def test_a_codec_that_leaves_values_out_stays_where_the_settings_begin_with_one() -> None:
    made = controller(fragments=1, codec_up="topk:10%")
    changes = all_thin(made, 0, 2 * SECOND_NS, RunMeasured(1e8, None, 1))
    assert {c.after for c in changes if c.what == "codec_up"} == {"topk:3%"}


def test_updates_that_most_fetch_too_slowly_have_fewer_bits_and_then_come_less_often() -> None:
    made = controller(fragments=1)
    made.look(0, 0, CALM, ALL)
    slow = RunMeasured(1e8, 1e7, 1, adopt_ns=1.2e9)
    (first,) = made.look(WINDOW_NS_MIN, 30, slow, ALL)
    assert (first.subject, first.what, first.before, first.after) == ("run", "codec_down", "int4", "int2")
    assert first.reason == "fetching a version takes 1,200 ms, and there are 690 for it"
    assert made.codec_down == "int2" and made.decided and made.row()["codec_down"] == "int2"
    slower = controller(fragments=1)
    slower.look(0, 0, CALM, ALL)
    both = slower.look(WINDOW_NS_MIN, 30, RunMeasured(1e8, 1e7, 1, adopt_ns=4e9), ALL)
    assert [(c.what, c.after) for c in both] == [("codec_down", "int2"), ("period", "21")]


def test_updates_get_their_bits_back_and_keep_them_where_fewer_did_not_help() -> None:
    made, now_ns = controller(fragments=1), 0
    made.look(0, 0, CALM, ALL)

    def turn(adopt_ns: float) -> list[tuple[str, str]]:
        nonlocal now_ns
        now_ns += WINDOW_NS_MIN
        return [(c.what, c.after) for c in made.look(now_ns, 30, RunMeasured(1e8, 1e7, 1, adopt_ns=adopt_ns), ALL)]

    assert turn(7.9e8) == [("codec_down", "int2")]
    assert [turn(1e8) for _ in range(3)] == [[], [], [("codec_down", "int4")]]
    made, now_ns = controller(fragments=1), 0
    made.look(0, 0, CALM, ALL)
    assert turn(7.9e8) == [("codec_down", "int2")]
    assert turn(7.8e8) == [("codec_down", "int4")], "it was not the bytes"
    assert not any(turn(7.9e8) for _ in range(20)), "so that it is not tried again soon"


def test_updates_keep_their_codec_while_somebody_reads_no_other() -> None:
    made = controller(fragments=1)
    made.look(0, 0, CALM, ALL)
    slow = RunMeasured(1e8, 1e7, 1, adopt_ns=1.2e9)
    (only,) = made.look(WINDOW_NS_MIN, 30, slow, ALL, any_update=False)
    assert only.what == "period" and made.codec_down == "int4"


def test_which_codecs_updates_may_have() -> None:
    def down(**settings: str) -> list[str]:
        return [name for name, _ in ladder_down(SyncConfig(**{"adaptive": "network", **settings}))]  # type: ignore[arg-type]

    assert down() == ["int4", "int2"] and down(codec_down="int2") == ["int2"]
    assert down(codec_down="fp32") == ["fp32", "bf16", "int8", "int4", "int2"]
    assert down(codec_down="topk:10%") == ["topk:10%"], "its size does not tell"
    assert down(adaptive="off") == ["int4"] and down(adaptive="learning") == ["int4"]


def test_a_codec_of_updates_is_restored_from_its_row() -> None:
    made = controller()
    made.restore({"codec_down": "int2"}, 5)
    assert made.codec_down == "int2" and made.decided
    assert [(c.what, c.after) for c in made.look(0, 6, CALM, ALL)] == [("codec_down", "int2")]
    for nonsense in ("int4", "fp32", "none", None, 7):
        other = controller()
        other.restore({"codec_down": nonsense}, 5)
        assert not other.decided


def skipping(made: AdaptiveController, now_ns: int, run: RunMeasured) -> list[tuple[str, str, str]]:
    """A window in which everybody answers one request after 0.3 s, and has nothing for the next."""
    for name, _ in ALL:
        for at_ns, size in ((now_ns, 1000), (now_ns + SECOND_NS, 0)):
            number = next(ROUNDS)
            made.asked(name, 0, number, at_ns)
            made.links.answered(name, 0, number, size, at_ns + 3 * SECOND_NS // 10)
    return [(c.subject, c.what, c.after) for c in made.look(now_ns + WINDOW_NS_MIN, 100, run, ALL)]


def test_where_most_skip_every_other_round_there_and_back_get_fewer_bits_one_after_the_other() -> None:
    """0.3 s up and 0.3 s down, of a period of 0.8 s: each of them fits, and not both with all that is between them."""
    made, run = controller(fragments=1), RunMeasured(1e8, 3e8, 1, adopt_ns=3e8)
    turns = [skipping(made, turn * WINDOW_NS_MIN, run) for turn in range(4)]
    assert turns == [[], [("run", "codec_down", "int2")], [], [(name, "codec_up", "int2") for name, _ in ALL]]


def test_learners_on_fat_links_that_skip_rounds_send_what_they_sent() -> None:
    made, run = controller(fragments=1), RunMeasured(1e9, 3e8, 1, adopt_ns=3e8)
    assert not any(skipping(made, turn * 16 * SECOND_NS, run) for turn in range(8)), "0.3 s are little of 8"


def test_a_link_that_thinned_out_while_it_was_judged_is_not_taken_for_one_that_bits_do_not_matter_to() -> None:
    made = controller(fragments=1)
    made.look(0, 0, CALM, ALL)
    now_ns, told = 0, list[str]()
    for adopt_s in (0.79, 3.0, 3.0):
        now_ns += WINDOW_NS_MIN
        run = RunMeasured(1e8, 1e7, 1, adopt_ns=adopt_s * 1e9)
        told += [f"{c.what} {c.after}" for c in made.look(now_ns, 30, run, ALL)]
    assert told[0] == "codec_down int2" and made.codec_down == "int2" and made.period > 8, told
