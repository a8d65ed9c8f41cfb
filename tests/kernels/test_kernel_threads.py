"""The thread pool of the kernels, and the cut into segments."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll import kernels
from atoll.errors import ConfigError
from atoll.kernels.constants import SEGMENT_BLOCKS
from atoll.kernels.pool import run_ranges
from atoll.kernels.run import cut_segments


@pytest.fixture(autouse=True)
def _restore_threads():
    before = kernels.threads()
    yield
    kernels.set_threads(before)


@settings(deadline=None, max_examples=50)
@given(count=st.integers(0, 300), per_task=st.integers(1, 60), threads=st.integers(1, 4))
def test_every_piece_is_done_once(count: int, per_task: int, threads: int) -> None:
    kernels.set_threads(threads)
    done, lock = [], threading.Lock()

    def work(lo: int, hi: int, scratch: int) -> bool:
        assert scratch % 64 == 0
        with lock:
            done.extend(range(lo, hi))
        return True

    assert run_ranges(count, per_task, work)
    assert sorted(done) == list(range(count))


def test_one_piece_that_is_not_finite_decides() -> None:
    kernels.set_threads(2)
    assert not run_ranges(100, 1, lambda lo, hi, scratch: lo != 57)


def test_a_thread_that_works_alone_hands_nothing_out() -> None:
    kernels.set_threads(3)
    pieces: list[tuple[int, int, threading.Thread]] = []

    def work(lo: int, hi: int, scratch: int) -> bool:
        pieces.append((lo, hi, threading.current_thread()))
        return True

    def alone() -> threading.Thread:
        run_ranges(100, 1, work)
        return threading.current_thread()

    with ThreadPoolExecutor(1, initializer=kernels.work_alone) as pool:
        worker = pool.submit(alone).result(10)
    assert pieces == [(0, 100, worker)]
    pieces.clear()
    run_ranges(100, 1, work)  # it was the other thread's wish, not this one's
    assert sorted(piece[:2] for piece in pieces) == [(i, i + 1) for i in range(100)]


def test_an_error_in_another_thread_reaches_the_caller() -> None:
    kernels.set_threads(2)
    caller = threading.current_thread()
    other_is_in = threading.Event()

    def work(lo: int, hi: int, scratch: int) -> bool:
        if threading.current_thread() is not caller:
            other_is_in.set()
            raise RuntimeError("from the other thread")
        assert other_is_in.wait(10)
        return True

    with pytest.raises(RuntimeError, match="from the other thread"):
        run_ranges(8, 1, work)


@pytest.mark.parametrize("count", [0, -1, 17, True, 1.5, "2"])
def test_thread_counts_that_make_no_sense_are_refused(count: object) -> None:
    with pytest.raises(ConfigError, match="whole number from 1 to 16"):
        kernels.set_threads(count)  # type: ignore[arg-type]


def test_many_python_threads_may_call_at_once_while_the_count_changes() -> None:
    n = 3 * SEGMENT_BLOCKS * kernels.BLOCK
    x = np.random.default_rng(0).standard_normal(n).astype(np.float32)

    def once(turn: int) -> bytes:
        kernels.set_threads(1 + turn % 3)
        payload = np.empty(n // 256 * 132, np.uint8)
        assert kernels.encode(kernels.INT4, x, payload)
        return payload.tobytes()

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(once, range(24)))) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_does_not_have() -> None:
    code = """
import os, signal, numpy as np
from atoll import kernels
kernels.set_threads(2)
x, payload = np.ones(2**20, np.float32), np.empty(2**22, np.uint8)
kernels.encode(kernels.FP32, x, payload)
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if kernels.encode(kernels.FP32, x, payload) else 1)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 3000), max_size=12))
def test_segments_cover_each_slice_in_order_and_never_cross_one(sizes: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    segments = cut_segments(offsets, int(offsets[-1]))
    lengths = np.diff(segments.starts)
    assert np.all(lengths > 0) and np.all(lengths <= SEGMENT_BLOCKS)
    assert np.all(np.diff(segments.slices) >= 0)
    assert segments.per_slice(lengths.astype(np.float64)).tolist() == [float(size) for size in sizes]


@pytest.mark.parametrize(("kind", "size"), [(kernels.INT4, 132), (kernels.INT2, 68)])
@pytest.mark.parametrize("count", [0, 1, 2, 9, 40])
def test_the_sum_of_packed_payloads_for_any_number_and_any_layout_of_the_coefficients(
    count: int, kind: int, size: int
) -> None:
    rng, n = np.random.default_rng(count), 3 * kernels.BLOCK
    payloads, decoded = [], np.zeros((count, n), np.float32)
    for i in range(count):
        payloads.append(np.empty(3 * size, np.uint8))
        x = rng.standard_normal(n).astype(np.float32)
        x[5 : 5 + 100 * (i % 2)] = 0.0  # int2 has another grid for blocks with zeros
        assert kernels.encode(kind, x, payloads[i])
        kernels.decode(kind, payloads[i], decoded[i], add=False)
    coefficients = rng.uniform(-0.01, 0.01, (2, count))
    segments = cut_segments(np.array([0, 1, 3]), 3)
    expected = [
        float(((c @ part.astype(np.float64)) ** 2).sum())
        for c, part in zip(coefficients, np.split(decoded, [256], axis=1), strict=True)
    ]
    for layout in ("C", "F"):
        squares = kernels.direction([kind] * count, payloads, np.array(coefficients, order=layout), segments)
        np.testing.assert_allclose(squares, expected, rtol=1e-6)
