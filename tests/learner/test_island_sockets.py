"""Ranks over plain sockets: the same promises as over gloo."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atoll.errors import IslandError
from atoll.learner import SocketLink

SIZE = 3


class Table:
    """Where ranks of one process lay down what they tell each other."""

    def __init__(self, size: int) -> None:
        self.told: dict[int, bytes] = {}
        self._all = threading.Barrier(size)

    def tell(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def tell(own: bytes) -> list[bytes]:
            self.told[rank] = own
            self._all.wait(10)
            return [self.told[other] for other in sorted(self.told)]

        return tell


def together(act: Callable[[SocketLink], Any], *, size: int = SIZE, timeout_s: float = 10.0) -> list[Any]:
    """What each rank's thread returned or raised."""
    table, found = Table(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = act(SocketLink(rank, size, table.tell(rank), timeout_s=timeout_s))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def test_texts_words_sums_and_commands_reach_every_rank() -> None:
    def act(link: SocketLink) -> Any:
        texts = link.compare("rank é " * (link.rank + 1))
        pending = [link.start(np.array([link.rank, 10], np.int64)) for _ in range(1)]
        values = np.array([link.rank + 1], np.int64)
        link.add_up(values)
        head = np.arange(4) if link.rank == 0 else np.zeros(4, np.int64)
        link.tell(head)
        return texts, pending[0].wait().tolist(), values.tolist(), head.tolist()

    texts = ["rank é " * (rank + 1) for rank in range(SIZE)]
    assert together(act) == [(texts, [3, 30], [6], [0, 1, 2, 3])] * SIZE


def test_all_ranks_may_send_more_than_the_network_holds_at_once() -> None:
    """Ranks that sent first and read then would wait for each other."""
    size = 3_000_000

    def act(link: SocketLink) -> Any:
        others = [rank for rank in range(SIZE) if rank != link.rank]
        came = {rank: np.zeros(size, np.float32) for rank in others}
        link.exchange({rank: np.full(size, link.rank, np.float32) for rank in others}, came)
        link.exchange_now({rank: np.zeros(0) for rank in others}, {rank: np.zeros(0) for rank in others})
        return all((values == rank).all() for rank, values in came.items())

    assert together(act) == [True] * SIZE


def test_a_rank_that_ends_or_stands_still_is_told_to_the_others() -> None:
    def act(link: SocketLink) -> Any:
        if link.rank == 2:
            for channel in link._channels:
                for peer in channel.peers.values():
                    peer.close()
            return "gone"
        return link.start(np.zeros(1, np.int64)).wait()

    for found in together(act)[:2]:
        assert isinstance(found, IslandError) and "start all ranks again" in str(found)
    still = together(lambda link: link.compare("x") if link.rank else "asleep", timeout_s=1.0)
    assert isinstance(still[1], IslandError) and "1 s" in str(still[1])


def test_ranks_that_disagree_on_a_size_are_told_so() -> None:
    def act(link: SocketLink) -> None:
        link.add_up(np.zeros(2 + (link.rank == 1), np.int64))

    assert any(isinstance(found, IslandError) and "bytes, not" in str(found) for found in together(act))


def test_whoever_does_not_know_the_secret_is_not_let_in() -> None:
    import json

    table = Table(2)
    ports: list[int] = []

    def stranger(own: bytes) -> list[bytes]:
        ports.append(json.loads(own)["port"])
        with socket.create_connection(("127.0.0.1", ports[0])) as peer:  # before any rank
            peer.sendall(b"x" * 21)
            table.tell(0)(own)
        return [table.told[rank] for rank in range(2)]

    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        link = SocketLink(rank, 2, stranger if rank == 0 else table.tell(1), timeout_s=10)
        found[rank] = link.compare(str(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: ["0", "1"], 1: ["0", "1"]}


def test_a_rank_that_cannot_be_reached_is_an_error_with_its_address() -> None:
    def tell(own: bytes) -> list[bytes]:
        return [b'{"port": 9, "hosts": ["127.0.0.1"], "machine": "", "secret": "00"}', own]

    with pytest.raises(IslandError, match=r"no way to \['127.0.0.1'\], port 9"):
        SocketLink(1, 2, tell, timeout_s=5)


def test_a_rank_that_goes_on_without_the_others_does_not_let_them_wait() -> None:
    def act(link: SocketLink) -> Any:
        if link.rank == 1:
            return link.close()  # it lives on, and its sockets with it
        return link.start(np.zeros(2, np.int64)).wait()

    found = together(act)
    cut = [isinstance(found[rank], IslandError) and "rank 1 has ended" in str(found[rank]) for rank in (0, 2)]
    assert all(cut), found
