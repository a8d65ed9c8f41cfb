"""The durability gate: what waits for the tape, and what a disk that fails changes."""

from __future__ import annotations

from atoll.core.durability_gate import LOOK_NS, RETRY_NS, Chore, DurabilityGate


def gate_with_facts(*said: str) -> tuple[DurabilityGate, list[str]]:
    """A fact is on its way to the disk, and these messages follow from it."""
    gate, out = DurabilityGate("commit"), list[str]()
    assert gate.remembered(first=True), "the tape must be synced"
    for text in said:
        gate.after_tape(lambda text=text: out.append(text))  # type: ignore[misc]
    return gate, out


def test_nothing_leaves_before_the_facts_that_it_follows_from_and_order_is_kept() -> None:
    gate, out = gate_with_facts("a", "b")
    assert not gate.remembered(first=True), "a sync is under way already"
    gate.after_tape(lambda: out.append("c"))
    assert out == []
    assert gate.synced(1) and out == ["a", "b"], "the second fact came after that sync began"
    assert not gate.synced(gate.appended) and out == ["a", "b", "c"]


def test_facts_that_nobody_waits_for_are_a_chore() -> None:
    gate = DurabilityGate("commit")
    assert not gate.remembered(first=False)
    assert [gate.chore(0), gate.chore(0)] == [Chore.SYNC, Chore.LOOK]


def test_a_disk_that_fails_lets_everything_pass_until_all_that_it_missed_is_written() -> None:
    gate, out = gate_with_facts("a")
    assert gate.failed("no space") and not gate.failed("no space"), "said once"
    gate.synced(1, "no space")
    assert out == ["a"] and not gate.remembered(first=True) and not gate.writes_commits
    gate.put_off({0, 1})
    assert gate.pause_ns == RETRY_NS and gate.chore(0) is Chore.CATCH_UP and not gate.mended()
    gate.written(0, again=True)
    assert gate.writes_commits, "new versions are written at once again while the old ones are"
    gate.written(1, again=True)
    assert gate.mended() == "no space" and gate.pause_ns == LOOK_NS and gate.remembered(first=True)


def test_at_level_interval_fragments_are_written_now_and_then_and_nothing_waits() -> None:
    gate = DurabilityGate("interval", 30 * LOOK_NS)
    assert not gate.remembered(first=True) and not gate.writes_commits
    gate.put_off({3})
    chores = [gate.chore(second * LOOK_NS) for second in range(32)]
    assert chores.index(Chore.CATCH_UP) == 30 and chores.count(Chore.CATCH_UP) == 1


def test_a_fenced_syncer_says_nothing_more() -> None:
    gate, out = gate_with_facts("a")
    gate.fence()
    gate.synced(1)
    gate.after_tape(lambda: out.append("b"))
    assert out == []
