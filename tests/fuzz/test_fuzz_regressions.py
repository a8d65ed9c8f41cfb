"""What the fuzzer has found, by name, with the bytes or values that did it. Each of these failed once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz_corpus import targets
from fuzz_engine import HANG_S, run_one, varint, watchdog
from fuzz_machines import LARGE, MODELS
from fuzz_store_samples import body_of, sector, slot_bytes
from world import STEP_NS, TENSORS, World

from atoll.core import effects as fx
from atoll.core import messages as m
from atoll.core.config import SyncConfig
from atoll.core.events import Warned
from atoll.core.layout import build_layout
from atoll.core.learner_machine import LearnerMachine
from atoll.core.syncer_machine import SyncerMachine
from atoll.errors import ConfigError, LayoutError, PayloadError, RemoteProtocolError
from atoll.learner import inner
from atoll.observe.lines import decode
from atoll.store import tape_record
from atoll.store.slot_reader import read_fragment
from atoll.store.slot_record import SECTOR
from atoll.wire import convert
from atoll.wire.convert import encode_syncer_message, parse_syncer_message

DEEP = b"[" * 3000 + b"]" * 3000
LONG = b"1" + b"0" * 400
"""A whole number that no float holds."""

REFUSED = {
    "a setting of 400 digits in a Welcome: OverflowError": ("wire.settings", b'{"outer_lr":' + LONG + b"}"),
    "a slot header with a text for a size: TypeError": (
        "store.slot_record.body",
        b'{"format":1,"epoch":1,"fragment":0,"version":0,"sequence":1,"arrays":[["t","float32","x",0,0]],"meta":[0,0,0]}',
    ),
    "a slot header that is a list: TypeError": ("store.slot_record.body", b"[1]"),
    "a slot header without a format: KeyError": ("store.slot_record.body", b"{}"),
    "a slot header as deep as a well: RecursionError": ("store.slot_record.body", DEEP[:1500] + DEEP[-1500:]),
    "a slot header with one number for its meta data: TypeError": (
        "store.slot_record.body",
        b'{"format":1,"epoch":1,"fragment":0,"version":0,"sequence":1,"arrays":[],"meta":[0]}',
    ),
    "a manifest about minus infinity: TypeError": (
        "store.manifest",
        bytes.fromhex(
            "7b22666f726d6174223a20312c202266696c6573223a205b5b22726f77732e6a736f6e222c20322c20226162225d5d2c202261626f7574"
            "223a202d496e66696e6974797d"
        ),
    ),
    "a manifest of format infinity: OverflowError": ("store.manifest", b'{"format": 1e999, "about": {}, "files": {}}'),
    "a manifest as deep as a well: RecursionError": ("store.manifest", DEEP),
    "a tensor file's header as deep as a well: RecursionError": (
        "store.tensorfile.header",
        b'{"__metadata__":' + DEEP + b"}",
    ),
    "a tensor file with a number for its metadata": ("store.tensorfile.header", b'{"__metadata__":7}'),
    "a tensor with a thousand dimensions of 4000 digits: a hang": (
        "store.tensorfile.header",
        b'{"t":{"dtype":"F32","data_offsets":[0,4],"shape":[' + b",".join([b"9" * 4000] * 1000) + b"]}}",
    ),
    "a list of parameters in which one has only a name: ValueError": (
        "store.export",
        b'{"run":{"format":1,"run":"r","fragments":1,"tensors":["w"],"seeded":true}}',
    ),
    "a run of 10^18 fragments: all memory": (
        "store.export",
        b'{"run":{"format":1,"run":"r","fragments":1000000000000000000,"tensors":[["w",[300],"float32","rda"]]}}',
    ),
    "a record without a run: KeyError": ("store.record", b'{"rows":{},"fragment_records":{}}'),
    "three bytes for a fragment's parameters: ValueError": ("vault.whole", bytes.fromhex("8a7d66")),
    "a setting of 5000 hexadecimal digits: ValueError": ("launch.settings", b"eval_every = 0x" + b"f" * 5000),
    "a fraction of 400 digits: OverflowError": ("launch.settings", b"outer_lr = " + LONG),
    "an address as deep as a well: RecursionError": ("launch.syncer_file", DEEP),
}
"""name -> (parser, the document inside): refused with a documented error."""

SURVIVED = {
    "a slot's meta data that is no JSON: JSONDecodeError": ("store.slots.meta", b"{"),
    "a slot's meta data that is a number: no dict": ("store.slots.meta", b"7"),
    "a tape's record that is no JSON: JSONDecodeError": (
        "store.tape.records",
        bytes.fromhex("64223a202243016d6d6974746564227d7d"),
    ),
    "a tape's record that is a list: TypeError": ("store.tape.rows", b"[1]"),
    "a tape's record as deep as a well: RecursionError": ("store.tape.rows", DEEP),
    "a tape's rows that are a list: ValueError": ("store.tape.rows", b'{"rows":[1]}'),
    "a tape whose format is a text: TypeError": ("store.tape.rows", b'{"tape":"x","rows":{}}'),
    "rows of a snapshot that are no JSON: JSONDecodeError": ("store.snapshot.rows", b"{"),
    "rows of a snapshot that are a list": ("store.snapshot.rows", b"[]"),
    "a snapshot's fragment without a version: KeyError": ("store.snapshot.about", b'{"fragment":0,"meta":{}}'),
    "a contribution of infinite size: OverflowError": (
        "store.handover.line",
        b'{"format":1,"about":{},"size":1e999,"checksum":1}',
    ),
    "a contribution as deep as a well: RecursionError": ("store.handover.line", b'{"about":' + DEEP[:2000]),
    "an epoch of 400 digits: a folder that cannot be named": ("store.epoch", b'{"epoch":' + LONG + b"}"),
    "an epoch as deep as a well: RecursionError": ("store.epoch", DEEP),
    "a claim of a text: TypeError": ("store.claims", b'{"fragments":{"0":["a",1]}}'),
    "a claim as deep as a well: RecursionError": ("store.claims", b'{"fragments":' + DEEP + b"}"),
    "a process of infinite number: OverflowError": (
        "launch.processes",
        bytes.fromhex(
            "5b7b22726f6c65223a20226c6561726e6572222c20226964223a202261222c2022706964223a2031653939392c2022737461727465"
            "64223a202235227d5d"
        ),
    ),
    "an announcement as deep as a well: RecursionError": ("launch.announced", DEEP),
    "an event with a loss of 400 digits: OverflowError": (
        "observe.line",
        b'{"t_ns":1,"kind":"run_finished","reason":"x","wall_s":1,"eval_loss":' + LONG + b"}",
    ),
}
"""name -> (parser, the document inside): read without an error, what cannot be used left out and named."""


def seal_of(parser: str) -> Any:
    import fuzz_store_samples
    import fuzz_wire

    return {
        "wire.settings": fuzz_wire._welcome,
        "store.slot_record.body": fuzz_store_samples.sector,
        "store.slots.meta": fuzz_store_samples.slot_meta,
        "store.tape.records": fuzz_store_samples.tape_of,
        "store.tape.rows": fuzz_store_samples.tape_of,
        "store.tensorfile.header": fuzz_store_samples.tensors_of,
        "store.snapshot.about": fuzz_store_samples.fragment_file,
        "store.handover.line": fuzz_store_samples.handed_of,
    }.get(parser, lambda document: document)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    parser, document = REFUSED[name]
    assert not run_one(targets()[parser], seal_of(parser)(document), name, measure=True)


@pytest.mark.parametrize("name", SURVIVED)
def test_survived(name: str) -> None:
    parser, document = SURVIVED[name]
    target = targets()[parser]
    try:
        run_one(replace(target, allowed=()), seal_of(parser)(document), name, measure=True)
    except AssertionError as error:
        # `load_snapshot`, which the parser ends with, has to raise when the only snapshot is of no use.
        assert parser.startswith("store.snapshot") and "StoreError" in str(error)


def test_an_event_with_a_count_that_no_report_could_compute_with_is_left_out() -> None:
    assert decode(b'{"t_ns":1,"kind":"warned","source":"a","text":"b"}') is not None
    assert decode(b'{"t_ns":' + LONG + b',"kind":"warned","source":"a","text":"b"}') is None


# ---------------------------------------------------------------- bounds on memory and time


def test_arrays_that_lie_over_each_other_do_not_add_up_to_any_memory(tmp_path: Path) -> None:
    """A header of 4 KiB may name the whole file a hundred times; each array was inside of the file."""
    data = bytearray(slot_bytes())
    values = json.loads(body_of(bytes(data[SECTOR : 2 * SECTOR])))
    values["arrays"] = [[f"a{i}", "uint8", len(data) - 8192, 8192, 0] for i in range(60)]
    data[SECTOR : 2 * SECTOR] = sector(json.dumps(values).encode())
    path = tmp_path / "fragment-0000.slots"
    path.write_bytes(data)
    read = read_fragment(path, 0)
    assert read.good is not None and read.good.version == 0
    assert any("its header speaks of" in fault for fault in read.faults)


def test_a_tape_of_nothing_but_markers_is_not_hashed_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    data = (tape_record.MARKER + (2**20).to_bytes(4, "little") + bytes(8)) * 2**17
    looks: list[int] = []
    original = tape_record._payload_at
    monkeypatch.setattr(tape_record, "_payload_at", lambda d, offset: looks.append(offset) or original(d, offset))
    records, fault = tape_record.read_records(data)
    assert records == [] and fault is not None
    assert len(looks) <= tape_record.FAULT_TRIES + 1


def blob_with(structure: dict[str, Any]) -> np.ndarray:
    about = inner.InnerAbout("a", "r", 1, 1, (0,), 1)
    return inner.pack(inner.Captured({"t": torch.zeros(2**16, dtype=torch.uint8)}, structure, about))


def test_inner_state_that_names_one_tensor_a_million_times_is_not_copied_a_million_times() -> None:
    node = {"array": "t", "as": ["|u1", [2**16]]}
    with pytest.raises(PayloadError, match="again and again"):
        inner.unpack(blob_with({"optimizer": None, "rng": None, "extras": {"x": [node] * 100_000}}))


def test_an_order_of_a_million_dimensions_is_not_searched_for_each_of_them() -> None:
    node = {"tensor": "t", "order": list(range(500_000))[::-1]}
    with watchdog(HANG_S), pytest.raises(PayloadError, match="other dimensions"):
        inner.unpack(blob_with({"optimizer": None, "rng": None, "extras": {"x": node}}))


def test_a_model_with_many_equal_names_is_refused_without_counting_each_of_them() -> None:
    specs = [m.TensorSpec("w", (256,), "float32")] * 500_000
    with watchdog(HANG_S), pytest.raises(LayoutError, match="two tensors are called 'w'"):
        build_layout(specs, 4)


@pytest.mark.parametrize("fragments", [0, -1, 2**62])
def test_a_number_of_fragments_that_cannot_be_is_refused(fragments: int) -> None:
    with pytest.raises(LayoutError):
        build_layout(MODELS[0], fragments)


EMPTY_TENSORS = b"\x22\x00" * (4 * 2**20)
"""Fields 4 of a Hello, two bytes each."""


@pytest.mark.parametrize(
    "inside", [EMPTY_TENSORS, b"\x3a" + varint(8 * 2**20) + bytes(8 * 2**20)], ids=["tensors", "bases"]
)
def test_a_hello_that_would_take_forty_times_its_size_is_refused_before_it_is_parsed(
    inside: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB of empty tensors took 336 MiB; the bound on the number of tensors came after that."""
    monkeypatch.setattr(convert, "parse_bytes", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(RemoteProtocolError):
        convert.parse_learner_message(b"\x0a" + varint(len(inside)) + inside)


def test_a_large_message_that_is_no_hello_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "parse_bytes", lambda *_: pytest.fail("it was parsed"))
    with pytest.raises(RemoteProtocolError):
        convert.parse_learner_message(b"\x1a" + varint(len(EMPTY_TENSORS)) + EMPTY_TENSORS)
    with pytest.raises(RemoteProtocolError):
        parse_syncer_message(bytes(9 * 2**20))


def test_a_hello_of_a_large_model_is_taken() -> None:
    tensors = tuple(m.TensorSpec(f"layers.{i:05}.{'x' * 90}", (4, 4), "float32") for i in range(50_000))
    data = convert.encode_learner_message(m.Hello("a", "i", 2, tensors))
    assert len(data) > 4 * 2**20
    hello = convert.parse_learner_message(data)
    assert isinstance(hello, m.Hello) and hello.tensors == tensors


# ---------------------------------------------------------------- machines


def config(**changes: Any) -> SyncConfig:
    return SyncConfig.from_dict({"sync_every": 4, "fragments": 4, "quorum": "1", "learners_expected": 2, **changes})


def test_a_hello_with_a_model_of_any_size_is_refused_and_does_not_raise() -> None:
    machine = SyncerMachine(config(), "run")
    out = machine.handle(fx.SessionOpened(1, m.Hello("a", "i", 2, MODELS[2])), 0)
    refusals = [e.message for e in out if isinstance(e, fx.ToLearner)]
    assert [type(r) for r in refusals] == [m.Refused] and refusals[0].code == m.Refusal.LAYOUT


def test_a_claimed_generation_leaves_room_to_count_on() -> None:
    world = World(config(), 2)
    world.join_all()
    for number, instance in enumerate(("x", "y", "z")):
        hello = m.Hello("l0", instance, 2, TENSORS, LARGE, "run-1")
        out = world.syncer.handle(fx.SessionOpened(100 + number, hello), 0)
        for effect in out:
            if isinstance(effect, fx.ToLearner):
                assert parse_syncer_message(encode_syncer_message(effect.message)) == effect.message


@pytest.mark.parametrize("said", ["ready", "progress"])
def test_a_step_beyond_all_bounds_does_not_lock_joiners_out(said: str) -> None:
    """With quorum 1 the clock followed it, and Start became a message that no learner accepts."""
    world = World(config(), 2)
    world.join_all()
    session = next(iter(world.learners.values())).session
    bases = (0, 0, 0, 0)
    ready, progress = m.Ready(LARGE, bases), m.Progress(LARGE, 1, 1, 1, 1.0, bases)
    world.to_syncer(fx.FromLearner(session, ready if said == "ready" else progress))
    world.run()
    out = world.syncer.handle(fx.SessionOpened(99, m.Hello("new", "n", 2, TENSORS)), 0)
    starts = [e.message for e in out if isinstance(e, fx.ToLearner) and isinstance(e.message, m.Start)]
    assert len(starts) == 1 and parse_syncer_message(encode_syncer_message(starts[0])) == starts[0]


def test_a_step_time_of_a_century_holds_no_round_beyond_its_timeout() -> None:
    """The grace window is a share of the median step: the upper of two, so one learner can make it any length."""
    world = World(config(quorum="1", grace_cap_steps=1000.0, overlap=8), 2)
    world.join_all()
    first, second = world.learners.values()
    second.push_delay = 10**15
    for _ in range(8):
        world.step(first)
        world.step(second)
        progress = replace(second.machine._state.report(), step_ns=LARGE)
        world.to_syncer(fx.FromLearner(second.session, progress))
    opened = [track.round for track in world.syncer.book.tracks if track.round is not None]
    assert opened and all(r.quorum_ns >= 0 for r in opened)
    assert all(r.grace_deadline_ns() <= r.launched_ns + world.config.quorum_timeout_ns for r in opened)


def test_contributions_that_are_all_too_old_to_weigh_anything_are_merged_alike() -> None:
    """age_discount 0 gave weights that were all zero, at which the merge itself failed and the syncer with it."""
    world = World(config(age_discount=0.0, quorum="1", grace_cap_steps=0.0), 2)
    world.join_all()
    slow = list(world.learners.values())[1]
    slow.push_delay = 6 * STEP_NS
    world.everyone_steps(30)
    for learner in world.learners.values():
        world.close(learner)
    world.advance(10**9)
    assert world.merges and all(sum(merge.weights) > 0 for merge in world.merges)


def test_a_process_that_was_here_with_another_model_before_the_run_began_may_push() -> None:
    """Its tables had the other model's number of fragments: IndexError at its first push."""
    machine = SyncerMachine(SyncConfig(sync_every=4), "run")
    machine.handle(fx.SessionOpened(1, m.Hello("a", "i", 2, MODELS[0])), 0)
    machine.handle(fx.SessionClosed(1, "cut"), 0)
    model = (m.TensorSpec("w", (2**20,), "float32"),)
    machine.handle(fx.SessionOpened(2, m.Hello("b", "i", 2, model)), 0)
    fragments = machine.config.fragments
    assert fragments > 1
    for p in range(fragments):
        header = m.PushHeader(m.PushKind.SEED, "b", 1, p, 0, 0, 0, -1, 0, 0, "fp32", 1, 1)
        machine.handle(fx.PushCompleted(header, True, 0.0), 0)
    machine.handle(fx.SeedCommitted((1,) * fragments), 0)
    machine.handle(fx.SessionOpened(3, m.Hello("a", "i", 2, model)), 0)
    machine.handle(fx.FromLearner(3, m.Ready(0, (0,) * fragments)), 0)
    header = m.PushHeader(m.PushKind.CONTRIBUTION, "a", 1, fragments - 1, 0, 0, 0, 0, 1, 10, "int4", 1, 1)
    answers = [e.reply for e in machine.handle(fx.PushOpened(header), 0) if isinstance(e, fx.Answer)]
    assert answers[0].accepted


STRANGE = {
    "Request": m.Request(1, 0, 4),
    "Published": m.Published(4095, 1, 1, 1, 0, 1, 1),
    "Fate": m.Fate(4, 0, -1, ""),
    "Start with too few": m.Start(0, (m.FragmentState(0, 1),), (4,)),
    "Start with too many": m.Start(0, (m.FragmentState(0, 1),) * 5, (4,) * 5),
    "Start of two lengths": m.Start(0, (m.FragmentState(0, 1),) * 4, (4,) * 3),
    "Start at the end of time": m.Start(LARGE, (m.FragmentState(0, 1),) * 4, (4,) * 4),
}


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("welcomed", [False, True])
def test_a_learner_passes_over_messages_for_fragments_that_it_does_not_have(name: str, welcomed: bool) -> None:
    """IndexError or ValueError, at which the link's thread ended and with it the learner's part in the run."""
    machine = LearnerMachine("a", "i", TENSORS)
    if welcomed:
        machine.handle(fx.FromSyncer(m.Welcome("run", 1, 1, config(), "f", False, 2)), 0)
    out = machine.handle(fx.FromSyncer(STRANGE[name]), 0)
    assert [type(effect.event) for effect in out if isinstance(effect, fx.Note)] == [Warned]
    assert machine.handle(fx.PushDone(4, 0, m.PushReply(True)), 0) == []
    assert machine.handle(fx.PushBroken(4095, 0), 0) == []


def test_a_record_with_an_infinite_count_of_tokens_is_refused() -> None:
    """Taken in, the ledger of the run that goes on would never add up again."""
    from fuzz_store_samples import run_record

    record = json.loads(run_record())
    record["fragment_records"]["2"]["accounts"][0][3] = "@"
    data = json.dumps(record).replace('"@"', "1e999").encode()
    assert not run_one(targets()["store.record"], data, "infinite tokens")


def test_a_config_from_python_with_a_number_that_no_float_holds_is_refused() -> None:
    with pytest.raises(ConfigError):
        SyncConfig(outer_lr=10**400)
