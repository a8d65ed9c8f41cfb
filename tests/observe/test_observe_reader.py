from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import SyntheticRun

from atoll.errors import LaunchError
from atoll.observe import Tail, read_events
from atoll.observe.events import Warned
from atoll.observe.lines import decode, encode, snake_case


def line(t_ns: int, text: str) -> bytes:
    return encode(t_ns, Warned("w", text))


def texts(events: object) -> list[str]:
    return [event.text for _, _, event in events]  # type: ignore[attr-defined]


def test_files_are_merged_by_time(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_bytes(line(1, "1") + line(4, "4"))
    (tmp_path / "events" / "b.jsonl").write_bytes(line(2, "2") + line(3, "3"))
    assert texts(read_events(tmp_path)) == ["1", "2", "3", "4"]


def test_unknown_kinds_fields_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    extra = json.dumps({"t_ns": 2, "kind": "warned", "source": "w", "text": "extra", "colour": "red"}).encode() + b"\n"
    bad = [
        b'{"t_ns":3,"kind":"from_the_future","x":1}\n',
        b"not json at all\n",
        b"\xff\xfe\x00\n",
        b"[1,2]\n",
        b'{"t_ns":"soon","kind":"warned","source":"w","text":"t"}\n',
        b'{"t_ns":5,"kind":"warned","source":"w"}\n',
        b'{"t_ns":5,"kind":"warned","source":"w","text":7}\n',
        b'{"t_ns":5,"kind":["warned"],"source":"w","text":"t"}\n',
        b"\n",
    ]
    torn = line(9, "torn")[:-10]
    (tmp_path / "events" / "a.jsonl").write_bytes(line(1, "first") + extra + b"".join(bad) + line(8, "last") + torn)
    assert texts(read_events(tmp_path)) == ["first", "extra", "last"]


@given(st.binary(max_size=300))
def test_decode_never_raises(data: bytes) -> None:
    decode(data)


@given(
    st.dictionaries(st.sampled_from(["t_ns", "kind", "text", "source"]), st.none() | st.integers() | st.text("ab{}"))
)
def test_decode_of_any_object_never_raises(values: dict[str, object]) -> None:
    decode(json.dumps({"kind": "warned", **values}).encode())


def test_every_event_survives_the_round_trip() -> None:
    for t_ns, _, event in SyntheticRun(seconds=20.0).events:
        decoded = decode(encode(t_ns, event))
        assert decoded is not None
        assert repr(decoded) == repr((t_ns, event))  # NaN is not equal to itself, but looks the same


def test_kinds_are_snake_case() -> None:
    assert snake_case("LearnerSteps") == "learner_steps"
    assert snake_case("Warned") == "warned"


def test_tail_gives_only_what_is_new_and_waits_for_the_rest_of_a_line(tmp_path: Path) -> None:
    tail = Tail(tmp_path)
    assert texts(tail.poll()) == []
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "a.jsonl"
    second = line(2, "second")
    path.write_bytes(line(1, "first") + second[:20])
    assert texts(tail.poll()) == ["first"]
    assert texts(tail.poll()) == []
    with path.open("ab") as file:
        file.write(second[20:])
    (tmp_path / "events" / "b.jsonl").write_bytes(line(1, "from b"))
    assert texts(tail.poll()) == ["from b", "second"]
    assert texts(tail.poll()) == []


def test_tail_begins_again_when_a_file_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    path = tmp_path / "events" / "a.jsonl"
    path.write_bytes(line(1, "a long first text"))
    tail = Tail(tmp_path)
    assert len(list(tail.poll())) == 1
    path.write_bytes(line(2, "new"))
    assert texts(tail.poll()) == ["new"]


def test_lines_across_read_chunks_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.observe.reader.READ_BYTES", 7)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_bytes(b"".join(line(i, str(i)) for i in range(20)))
    assert texts(read_events(tmp_path)) == [str(i) for i in range(20)]


def test_an_endless_line_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.observe.reader.READ_BYTES", 64)
    monkeypatch.setattr("atoll.observe.reader.LINE_BYTES_MAX", 256)
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "a.jsonl").write_bytes(b"x" * 2000 + b"\n" + line(1, "after"))
    assert texts(read_events(tmp_path)) == ["after"]


def test_a_folder_without_events_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"no events in .*; give the folder"):
        read_events(tmp_path)
