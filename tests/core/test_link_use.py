"""What of an answer's time is the uplink's, and what fewer bits were worth."""

from __future__ import annotations

from atoll.core.adaptive import AdaptiveController
from atoll.core.codec_ladder import ladder_of
from atoll.core.config import CODECS, SyncConfig
from atoll.core.link_ladder import LinkPlace, next_rung
from atoll.core.link_use import LinkMeasured, LinkWatch
from atoll.core.run_rhythm import RunMeasured

S = 1_000_000_000
CONFIG = SyncConfig(adaptive="network", fragments=1)
KNOWS = frozenset(CODECS.names())


def test_an_uplink_is_idle_while_its_learner_waits_for_what_became_of_its_last_answer() -> None:
    watch = LinkWatch()
    watch.asked("paris", 0, 1, 0)
    watch.answered("paris", 0, 1, 100, 1 * S)
    watch.merged("paris", 0, 7)
    watch.asked("paris", 0, 2, 2 * S)
    waiting = watch.take("paris", 5 * S)
    assert waiting is not None and waiting.waiting_ns == 0 and waiting.each_ns == 1 * S
    watch.adopted("paris", (6,), 5 * S)  # an older one: it still waits
    watch.adopted("paris", (7,), 6 * S)
    watch.answered("paris", 0, 2, 100, 7 * S)
    measured = watch.take("paris", 7 * S)
    assert measured is not None and measured.each_ns == 1 * S


def test_a_learner_that_pushes_for_long_is_not_taken_for_one_that_waits() -> None:
    """It adopts what the others make meanwhile, and none of it holds anything of its own."""
    watch = LinkWatch()
    watch.asked("paris", 0, 1, 0)
    for second in range(1, 9):
        watch.adopted("paris", (second,), second * S)
    watch.answered("paris", 0, 1, 100, 9 * S)
    measured = watch.take("paris", 9 * S)
    assert measured is not None and measured.each_ns == 9 * S


def test_answers_that_waited_behind_old_updates_do_not_say_that_fewer_bits_did_not_help() -> None:
    link = LinkPlace(ladder_of(CONFIG))
    assert next_rung(link, LinkMeasured(4 * S, 1), 1.0 * S, 0)[0] > 0
    link.each_ns = 4.0 * S
    link.floor = 1
    link.moved(1)
    assert next_rung(link, LinkMeasured(9 * S, 2), 1.0 * S, 3 * S) == (1, "")
    assert next_rung(link, LinkMeasured(2 * S, 1), 1.0 * S, 6 * S) == (1, "")
    assert link.in_vain_ns < 0


def test_more_bits_come_back_only_after_the_period_has() -> None:
    """In a long period every link seems to have room."""
    made = AdaptiveController(CONFIG)
    made.restore({"period": 16, "codecs": {"paris": "int2"}}, 0)
    said = []
    for window in range(12):
        now_ns = 4 * S * window
        for number in range(4):
            made.asked("paris", 0, 4 * window + number, now_ns + number * S)
            made.links.answered("paris", 0, 4 * window + number, 100, now_ns + number * S + S // 20)
        takes_ns = 1.2 * S if window < 6 else 0.1 * S  # of a period of 1.6 s, and of 0.8 as the settings have it
        said += made.look(now_ns + 4 * S, window, RunMeasured(0.1 * S, takes_ns, 1), [("paris", KNOWS)])
    after = [(change.what, change.after) for change in said if "restart" not in change.reason]
    assert after == [("period", "8"), ("codec_up", "int4")]
