"""What the comparison works out of its runs: lost steps by each system's own word, tables, plans and the page."""

from __future__ import annotations

import importlib
import ipaddress
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "benchmarks" / "peers"
MODULES = ("pictures", "result", "scenarios", "systems", "tables", "net", "cluster", "bakeoff", "preflight", "page")


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's modules, whose names are their own only there."""
    monkeypatch.syspath_prepend(str(HERE))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    class Modules:
        def __getattr__(self, name: str) -> ModuleType:
            return importlib.import_module(name)

    yield Modules()
    for name in MODULES:
        sys.modules.pop(name, None)


def steps(pid: int, times: list[float], **fates: Any) -> list[dict[str, Any]]:
    return [{"t": t, "step": i, "loss": 1.0, "pid": pid, **fates} for i, t in enumerate(times)]


def test_steps_of_a_killed_process_that_had_not_come_into_the_model_are_lost(peers: Any) -> None:
    dead = steps(1, [0.0, 1.0, 2.0, 3.0, 4.0], kept=3, lost=0)
    back = steps(2, [8.0, 9.0], kept=0, lost=0)
    untouched = steps(3, [float(t) for t in range(10)], kept=8, lost=0)
    assert peers.result.lost_by_count([dead + back, untouched], {2, 3}, 0.0, 10.0) == 2
    assert peers.result.lost_by_count([untouched], {3}, 0.0, 10.0) == 0, "what is pending is not lost"


def test_what_was_lost_before_the_window_is_not_counted(peers: Any) -> None:
    lines = steps(1, [1.0, 2.0], kept=0, lost=24) + steps(1, [6.0, 7.0], kept=24, lost=48)
    assert peers.result.lost_by_count([lines], {1}, 5.0, 10.0) == 24


def test_rounds_that_a_server_never_merged_are_lost_but_for_the_open_one(peers: Any, tmp_path: Path) -> None:
    (tmp_path / "merged.txt").write_text("7-0\n")
    rounds = [steps(7, [float(n)] * 8, round=f"7-{n}") for n in range(3)]
    lines = [line for one in rounds for line in one]
    assert peers.result.lost_by_round(tmp_path, [lines], {7}, 0.0, 10.0) == 8
    assert peers.result.lost_by_round(tmp_path, [lines], set(), 0.0, 10.0) == 16


def test_atolls_ledger_says_what_was_neither_merged_nor_is_pending(peers: Any, tmp_path: Path) -> None:
    offset = time.time() - time.monotonic()
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    stats = [
        {"t_ns": int((t + offset) * 1e9), "kind": "syncer_stats", "tokens_merged": merged, "tokens_pending": pending}
        for t, merged, pending in ((1.5, 100, 100), (8.5, 600, 200))
    ]
    (events / "syncer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in stats))
    lines = steps(1, [t + 0.1 for t in range(10)])  # 2 steps by 1.5, 9 by 8.5; the ledger knows of 2 and 8
    assert peers.result.lost_by_ledger(tmp_path, [lines], 0.0, 10.0, 100) == pytest.approx(1.0)
    assert peers.result.lost_by_ledger(tmp_path, [lines], 20.0, 30.0, 100) is None


def test_who_makes_no_step_any_more_stands_still_and_who_is_slow_does_not(peers: Any) -> None:
    quick, slow, hung = steps(1, [96.0, 98.0, 99.9]), steps(2, [10.0, 40.0, 70.0]), steps(3, [1.0, 2.0, 3.0])
    assert peers.result.standing_still([quick, slow, hung, []], 100.0) == [2, 3]


def row(peers: Any, system: str, scenario: str, **more: Any) -> str:
    return str(peers.result.Result(system, scenario, 0, **more).line())


def test_a_measured_zero_is_shown_as_one_and_what_never_came_back_says_so(peers: Any, tmp_path: Path) -> None:
    lines = [
        row(
            peers, "atoll", "kill", steps_per_s=60.0, lost_steps=0.0, rejoin_s=2.0, returned="1 of 1", person="nothing"
        ),
        row(
            peers,
            "torchft",
            "kill",
            steps_per_s=0.0,
            lost_steps=96.0,
            returned="0 of 1",
            standing=3,
            why="3 of 4 stood",
        ),
        row(peers, "ddp", "kill", why="not possible: the group ends with any of its ranks"),
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    text = peers.tables.write_tables(tmp_path)
    assert "| kill | 60.0 | 0.0 | not possible |" in text
    assert "| kill | 0 | 96 | not possible |" in text
    assert "| kill | 2.0 | did not return | not possible |" in text
    assert "torchft DiLoCo, kill: 3 of 4 stood (1x)" in text


def test_the_page_says_first_where_atoll_loses(peers: Any, tmp_path: Path) -> None:
    lines = [row(peers, "atoll", "clean", steps_per_s=70.0 + n, ideal_steps_per_s=80.0, start_s=9.0) for n in range(3)]
    lines += [
        row(peers, "flower", "clean", steps_per_s=60.0 + n, ideal_steps_per_s=80.0, start_s=6.0) for n in range(3)
    ]
    lines += [row(peers, "bare", "clean", steps_per_s=80.0, ideal_steps_per_s=80.0, start_s=1.0)]
    results = tmp_path / "peers.jsonl"
    results.write_text("\n".join(lines) + "\n")
    text = peers.page.write_page(results, "scripts/bakeoff").read_text()
    loses, ties, ahead = (text.index(f"## {title}") for title in ("Where Atoll loses", "Where it ties", "Where it is"))
    assert loses < text.index("third step, s: clean 9.0 against 6.0 (Flower FedAvg)") < ties < ahead
    assert text.index("all learners: clean 71.0 against 61.0 (Flower FedAvg)") > ahead
    assert (tmp_path / "figures" / "peers-pace.png").stat().st_size > 1000


def test_a_scenario_that_needs_more_learners_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "bakeoff.py"), "--folder", str(tmp_path), "--world", "2"]
    done = subprocess.run([*command, "--scenarios", "slow"], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "slow needs 4 learners" in done.stderr


def test_a_resumed_plan_leaves_out_what_was_measured_and_passes_are_whole(peers: Any, tmp_path: Path) -> None:
    options = peers.bakeoff.argparse.Namespace(
        systems="atoll,ddp", scenarios="clean,slow", quick=False, short=False, plan=None, world=4, repeat=2,
        folder=tmp_path, resume=tmp_path / "old.jsonl",
    )  # fmt: skip
    options.resume.write_text(row(peers, "atoll", "clean") + "\n" + row(peers, "ddp", "slow") + "\n")
    cells = peers.bakeoff.Bakeoff(options)._cells
    assert cells[:2] == [(0, "clean", "ddp", ""), (0, "slow", "atoll", "")]
    assert {seed for seed, *_ in cells[2:]} == {1} and len(cells) == 6


def test_every_system_counts_the_lines_that_it_adds_and_none_of_the_bare_ones(peers: Any) -> None:
    lines = {name: system.code_lines for name, system in peers.systems.SYSTEMS.items()}
    assert lines["bare"] == 0 and 0 < lines["atoll"] < lines["hivemind"] < lines["torchft"]


def test_all_of_it_at_once_has_all_of_it(peers: Any) -> None:
    one = peers.scenarios.SCENARIOS["all"]
    assert {fault.what for fault in one.faults} == {"kill", "coordinator", "partition", "join"}
    assert one.factors and one.jitter and one.rate and one.rates and one.delay_ms


def test_nets_side_by_side_have_addresses_of_their_own(peers: Any) -> None:
    first, second = peers.net.Loopback(3, place=0), peers.net.Loopback(3, place=1)
    assert not set(first.addresses) & set(second.addresses) and first.bytes_sent() is None


def test_steps_without_an_exchange_are_an_error_and_no_numbers(peers: Any, tmp_path: Path) -> None:
    alone = [steps(1, [1.0, 2.0], kept=0, lost=2), steps(2, [1.0, 2.0], kept=0, lost=2)]
    assert peers.result.exchanges("steps", tmp_path, alone) == 0
    assert peers.result.exchanges("steps", tmp_path, [steps(1, [1.0, 2.0], kept=2, lost=0), []]) == 1
    assert peers.result.exchanges("steps", tmp_path, [steps(1, [1.0], kept=2, lost=0, averaged=0)]) == 0
    assert peers.result.exchanges("steps", tmp_path, [steps(1, [1.0, 2.0])]) == 2, "each of DDP's steps is one"
    assert peers.result.exchanges("ledger", tmp_path, alone) == peers.result.exchanges("rounds", tmp_path, alone) == 0
    events = tmp_path / "run" / "events"
    events.mkdir(parents=True)
    lines = [{"kind": "syncer_stats", "commits": count} for count in (0, 7)]
    (events / "syncer-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "merged.txt").write_text("7-0\n7-1\n")
    assert peers.result.exchanges("ledger", tmp_path, alone) == 7
    assert peers.result.exchanges("rounds", tmp_path, alone) == 2


def test_a_void_run_keeps_no_number_and_is_tried_again(peers: Any, tmp_path: Path) -> None:
    result = peers.result.Result("torchft", "clean", 0, steps_per_s=60.0, loss=2.0, pause_s=0.1)
    result.void("no exchange was made")
    line = json.loads(result.line())
    assert line["steps_per_s"] is line["loss"] is line["pause_s"] is None and "no exchange" in line["why"]
    options = peers.bakeoff.argparse.Namespace(
        systems="ddp", scenarios="clean", quick=False, short=False, plan=None, world=4, repeat=1, folder=tmp_path,
        resume=tmp_path / "old.jsonl",
    )  # fmt: skip
    options.resume.write_text(row(peers, "ddp", "clean", why=line["why"]) + "\n")
    assert peers.bakeoff.Bakeoff(options)._cells == [(0, "clean", "ddp", "")]


def test_who_listens_is_read_from_the_kernels_table(peers: Any) -> None:
    head = "  sl  local_address rem_address   st\n"
    mapped = "   0: 0000000000000000FFFF0000010713C6:72E9 00000000000000000000000000000000:0000 0A 00000000\n"
    assert peers.cluster._has_listener(head + mapped, "198.19.7.1")
    assert not peers.cluster._has_listener(head + mapped, "198.19.7.2")
    assert not peers.cluster._has_listener(head + mapped.replace(" 0A ", " 01 "), "198.19.7.1")


def test_the_preflight_says_what_is_missing_and_who_is_left(peers: Any, tmp_path: Path) -> None:
    import_of = peers.preflight.IMPORTS
    import_of[""] = "import nothing_of_this_name"
    assert "No module named 'nothing_of_this_name'" in peers.preflight.lack_of_imports("", 60.0)
    assert peers.preflight.lack_of_run({"steps_per_s": 40.0, "exchanges": 3, "why": ""}) == ""
    assert peers.preflight.lack_of_run({"steps_per_s": None, "exchanges": None, "why": "failed: no"}) == "failed: no"


def test_a_row_without_numbers_spoils_no_page_and_times_in_last_words_are_left_out(peers: Any, tmp_path: Path) -> None:
    lines = [row(peers, "atoll", "clean", steps_per_s=70.0, ideal_steps_per_s=80.0)]
    for second in (1, 2):
        why = f"failed: 2026-11-18T10:05:0{second}.9 [INFO] no quorum"
        lines.append(row(peers, "torchft", "clean", ideal_steps_per_s=80.0, why=why))
    (tmp_path / "peers.jsonl").write_text("\n".join(lines) + "\n")
    text = peers.page.write_page(tmp_path / "peers.jsonl", "benchmarks/peers/plan.sh").read_text()
    assert "torchft DiLoCo, clean: failed: [INFO] no quorum (2x)" in text
    flare = "2026-11-18 18:33:05,606 - ClientRunner - INFO - [identity=site-1, run=e9a5d893, peer=bakeo"
    assert peers.tables.TIMES.sub("", flare).strip() == "ClientRunner - INFO -"


def test_the_page_takes_day_machine_and_versions_from_the_runs(peers: Any, tmp_path: Path) -> None:
    more = {"cores": 2, "date": "2026-11-18", "machine": "16 cores, Linux 6.1", "versions": "torchft 0.2.0"}
    (tmp_path / "results.jsonl").write_text(row(peers, "torchft", "clean", steps_per_s=1.0, **more) + "\n")
    text = peers.tables.write_tables(tmp_path)
    assert text.startswith("2026-11-18, 16 cores, Linux 6.1; 2 cores for each run.")
    assert "| torchft DiLoCo | torchft 0.2.0 |" in text


def test_wheels_that_are_not_there_are_said_with_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run([str(HERE / "wheels"), "unpack", str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "run benchmarks/peers/wheels fetch first" in done.stderr


def test_the_quick_form_is_a_quarter_of_an_hour(peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.systems.System, "there", True)
    b = peers.bakeoff
    options = b.argparse.Namespace(
        systems="", scenarios="", quick=True, short=False, plan=None, world=4, repeat=1, folder=tmp_path, resume=None,
        jobs=1,
        seconds=b.QUICK_SECONDS, step_ms=b.QUICK_STEP_MS, batch=0, steps=b.QUICK_STEPS,
    )  # fmt: skip
    assert b.Bakeoff(options).expected_s() <= 900


def test_hosts_have_addresses_that_libp2p_tells_its_peers_of(peers: Any) -> None:
    """Public or private ones: of addresses for benchmarks (198.18.0.0/15) it tells nobody, and nothing is averaged."""
    first = ipaddress.ip_address(peers.net.Net(1, [0.0]).addresses[0])
    private = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16")
    assert any(first in ipaddress.ip_network(net) for net in private)


def plan_of(peers: Any, tmp_path: Path, text: str, systems: str = "") -> list[Any]:
    (tmp_path / "plan.txt").write_text(text)
    options = peers.bakeoff.argparse.Namespace(
        systems=systems, scenarios="", quick=False, short=False, world=4, repeat=1, folder=tmp_path, resume=None,
        plan=tmp_path / "plan.txt",
    )  # fmt: skip
    return list(peers.bakeoff.Bakeoff(options)._cells)


def test_a_plan_is_worked_off_by_worth_and_nothing_of_it_twice(peers: Any, tmp_path: Path) -> None:
    text = "# by worth\n1 kill atoll,ddp\n2 kill,clean ddp  # three more\n"
    cells = [(0, "kill", "atoll", ""), (0, "kill", "ddp", ""), (0, "clean", "ddp", ""), (1, "kill", "ddp", "")]
    assert plan_of(peers, tmp_path, text) == [*cells, (1, "clean", "ddp", "")]
    assert plan_of(peers, tmp_path, text, "atoll") == cells[:1], "what does not work here is left out"


@pytest.mark.parametrize("line", ["kill atoll,ddp", "some kill atoll", "1 kil atoll", "1 kill atol"])
def test_a_line_of_a_plan_that_says_nothing_is_told(peers: Any, tmp_path: Path, line: str) -> None:
    with pytest.raises(SystemExit, match=r"RUNS SCENARIOS SYSTEMS|choose from"):
        plan_of(peers, tmp_path, line + "\n")


def test_the_plan_of_the_page_names_every_system_and_scenario_of_the_comparison(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers.systems.System, "there", True)
    cells = plan_of(peers, tmp_path, (HERE / "plan.txt").read_text())
    assert set(peers.systems.DEVICE) <= {name for _, _, name, _ in cells}
    wanted = ["clean", "jitter", "slow", "generations", "kill", "kills", "coordinator", "partition", "join", "delay"]
    wanted += ["thin", "all", "tokens"]
    assert {*wanted, *(f"{rate}-small" for rate in ("1gbit", "100mbit", "20mbit", "5mbit"))} <= {c[1] for c in cells}


def test_children_in_sessions_of_their_own_are_counted_and_end_with_their_host(peers: Any) -> None:
    """NVIDIA FLARE's sites start the process that trains with setsid: who is killed must not go on training."""
    child = "import subprocess, sys; subprocess.Popen(['sleep', '60'], start_new_session=True).wait()"
    one = peers.cluster.Cluster("bare", peers.systems.SYSTEMS["bare"], peers.scenarios.Scenario(""), world=1, seed=0)
    one._net = peers.net.Loopback(2)
    one._start(1, [sys.executable, "-c", child])
    deadline = time.monotonic() + 20
    while len(alive := one._alive()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(alive) == 2
    one.clear()
    time.sleep(0.2)
    assert not any("sleep" in (Path(f"/proc/{pid}/cmdline").read_text() if Path(f"/proc/{pid}").exists() else "")
                   for pid in alive)  # fmt: skip


def test_a_listener_at_all_addresses_listens_here_too(peers: Any) -> None:
    table = "  sl  local_address rem_address   st\n   0: 00000000:72E9 00000000:0000 0A 00000000\n"
    assert peers.cluster._has_listener(table, "100.64.7.1")


def test_who_goes_on_after_a_partition_needs_nobody(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = peers.cluster.Cluster("bare", peers.systems.SYSTEMS["bare"], peers.scenarios.Scenario(""), world=1, seed=0)
    counts = iter([3, 3, 4])
    monkeypatch.setattr(peers.cluster.r, "worker_lines", lambda *_: [None] * next(counts))
    result = peers.result.Result(
        "bare", "partition", 0, standing=1, why="1 of 1 workers stood still", person="start it"
    )
    one._watch_those_who_stand(result)
    one.clear()
    assert result.person == "nothing" and "all went on 0 s after the window" in result.why


def test_a_single_run_is_marked_where_others_are_several(peers: Any, tmp_path: Path) -> None:
    rows = [row(peers, "atoll", "clean", steps_per_s=60.0, cores=2) for _ in range(2)]
    rows.append(row(peers, "ddp", "clean", steps_per_s=50.0, cores=2))
    (tmp_path / "results.jsonl").write_text("\n".join(rows[1:]) + "\n")
    text = peers.tables.write_tables(tmp_path)
    assert "One run of each cell." in text and "| clean | 60.0 | 50.0 |" in text
    (tmp_path / "results.jsonl").write_text("\n".join(rows) + "\n")
    text = peers.tables.write_tables(tmp_path)
    assert "1 to 2 runs" in text and "| clean | 60.0 | 50.0¹ |" in text


def test_a_difference_between_single_runs_within_their_noise_is_a_tie(peers: Any, tmp_path: Path) -> None:
    rows = [row(peers, "atoll", "clean", steps_per_s=50.0, loss=2.40)]
    rows.append(row(peers, "ddp", "clean", steps_per_s=46.0, loss=2.30))
    (tmp_path / "results.jsonl").write_text("\n".join(rows) + "\n")
    worse, ties, better = peers.page.verdicts(peers.tables.read_cells(tmp_path / "results.jsonl"))
    assert "50.0 against 46.0" in ties[0] and "2.400 against 2.300" in worse[0] and not better


def test_a_busy_machine_is_told_of(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.cluster.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(peers.cluster.os, "getloadavg", lambda: (80.0, 1.0, 1.0))
    assert peers.cluster.too_busy() == " (this machine is busy: a load of 80 on 2 cores)"
    monkeypatch.setattr(peers.cluster.os, "getloadavg", lambda: (2.0, 80.0, 80.0))
    assert peers.cluster.too_busy() == ""
