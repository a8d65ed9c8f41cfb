"""What a syncer says of its run, in lines, and what it remembers for those who look in later."""

from __future__ import annotations

import pytest

from atoll.observe import NullWriter, events
from atoll.syncer.news import RATE_WINDOW_S, WARNINGS_KEPT, Flow, News
from atoll.syncer.teller import HEALED_QUIET_S, LINES_MAX, WINDOW_S, Teller


class Listener:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now_s = 100.0
        self.teller = Teller(self.lines.append, lambda learner: "10.0.0.3", clock=lambda: self.now_s)

    def hear(self, *heard: events.Event) -> list[str]:
        before = len(self.lines)
        for event in heard:
            self.teller.hear(event)
        return self.lines[before:]


def committed(version: int, *learners: str) -> events.Committed:
    return events.Committed(2, version, 1, list(learners), 10, 1, 1, 1.0, 0.0, 1)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (events.MemberChanged("a", 1, "joining", "joined"), "a joins (generation 1) from 10.0.0.3"),
        (
            events.MemberChanged("a", 2, "joining", "a newer process took over"),
            "a joins (generation 2, a newer process took over) from 10.0.0.3",
        ),
        (events.MemberChanged("a", 1, "active", "ready at step 7"), "a trains, ready at step 7"),
        (events.MemberChanged("a", 1, "active", "heard again"), "a is back: heard again"),
        (events.MemberChanged("a", 1, "away", "silent for 15 s"), "a is away: silent for 15 s"),
        (events.MemberChanged("a", 1, "lost", "away for 60 s"), "a is lost, until it comes back: away for 60 s"),
        (events.MemberChanged("a", 1, "left", "finished"), "a has left: finished"),
        (events.MemberAside("a", 1, True, "missed 4 rounds"), "a is set aside: missed 4 rounds"),
        (events.MemberAside("a", 1, False, "it answered"), "a is counted again: it answered"),
        (events.LinkThin("a", "up", 5000.0, 1500.0), "a's link is too thin: up, needs 5.0 kB/s, gets 1.5 kB/s"),
        (
            events.DurabilityChanged("degraded", "commit", "No space left"),
            "disk: nothing new is durable (No space left); training goes on, and writing is tried again",
        ),
        (events.DurabilityChanged("commit", "commit", "done"), "disk: all is durable again (level commit; done)"),
        (
            events.SnapshotWritten("s3://b/r", 3, 2_000_000, 1_500_000_000, [4, 5]),
            "snapshot 3 written to s3://b/r: versions 4 to 5 (2.0 MB, 1.5 s)",
        ),
        (events.SnapshotFailed("s3://b/r", "snapshot to s3://b/r failed"), "snapshot to s3://b/r failed"),
        (events.Warned("syncer", "be careful"), "warning: be careful"),
        (events.Warned("learner-1", "be careful"), "warning from learner-1: be careful"),
    ],
)
def test_each_event_that_matters_is_one_line(event: events.Event, line: str) -> None:
    assert Listener().hear(event) == [line]


def test_only_the_first_commit_is_told_and_statistics_are_not() -> None:
    listener = Listener()
    assert listener.hear(committed(1, "a", "b")) == ["first commit: version 1 of fragment 2, by a, b"]
    assert listener.hear(committed(2, "a"), events.SyncerStats(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0)) == []


def test_healing_is_told_as_a_whole_when_it_is_over() -> None:
    listener = Listener()
    healed = [events.FragmentHealed(0, 356, 373, "b"), events.FragmentHealed(1, 357, 372, "a")]
    assert listener.hear(*healed) == []
    listener.now_s += HEALED_QUIET_S
    (line,) = listener.hear(committed(373, "a"))[:1]
    assert line == "heals: 2 fragments from versions 356 to 373, which learners had kept (a, b)"


def test_a_storm_of_one_kind_is_counted_and_does_not_hide_the_others() -> None:
    listener = Listener()
    joins = [events.MemberChanged(f"l{number}", 1, "joining", "joined") for number in range(1000)]
    assert len(listener.hear(*joins)) == LINES_MAX
    assert listener.hear(events.Warned("syncer", "x")) == ["warning: x"]
    listener.now_s += WINDOW_S
    assert listener.hear(*joins[:1]) == [
        f"... and {1000 - LINES_MAX} more of these in {WINDOW_S:g} s (MemberChanged)",
        "l0 joins (generation 1) from 10.0.0.3",
    ]


def test_the_last_warnings_snapshots_and_thin_links_are_kept_for_those_who_look_in() -> None:
    news = News(NullWriter())
    assert news.status() == {"warnings": [], "snapshots": {}, "rounds": []} and not news.ever_active
    for number in range(WARNINGS_KEPT + 5):
        news.emit(events.Warned("syncer", f"warning {number}"))
    news.emit(events.SnapshotWritten("s3://b/r", 3, 1, 1, [4, 5]))
    news.emit(events.SnapshotFailed("s3://b/r", "no room"))
    news.emit(events.LinkThin("a", "up", 5000.0, 1500.0))
    news.emit(events.LinkThin("a", "down", 5000.0, 9000.0))
    news.emit(events.MemberChanged("a", 1, "active", "ready at step 0"))
    told = news.status()
    assert [one["text"] for one in told["warnings"]] == [f"warning {n}" for n in range(5, WARNINGS_KEPT + 5)]
    assert told["snapshots"]["label"] == 3 and told["snapshots"]["failed"] == "no room" and news.ever_active
    assert news.thin("a") == ["up: needs 5000 bytes/s, gets 1500"]
    news.emit(events.SnapshotWritten("s3://b/r", 4, 1, 1, [6]))
    news.emit(events.MemberChanged("a", 2, "joining", "joined"))
    assert "failed" not in news.status()["snapshots"] and news.thin("a") == []


def test_a_flow_is_bytes_per_second_and_fades() -> None:
    now_s = [0.0]
    flow = Flow(clock=lambda: now_s[0])
    for _ in range(20 * round(RATE_WINDOW_S)):
        now_s[0] += 0.5
        flow.add("a", 500)
    assert flow.rate("a") == pytest.approx(1000, rel=0.05) and flow.rate("b") == 0
    now_s[0] += 10 * RATE_WINDOW_S
    assert flow.rate("a") < 1
