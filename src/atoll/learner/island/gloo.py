"""`RankLink` over gloo groups of Atoll's own, beside whatever the training uses. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from atoll.learner.island.link import I64, ISLAND_TIMEOUT_S, SPEAKER, cannot_go_on

TEXT_BYTES_MAX = 4096
"""Of what ranks tell each other about themselves when they meet."""


class GlooWord:
    def __init__(self, tensor: torch.Tensor, work: Any, timeout_s: float) -> None:
        self._tensor = tensor
        self._work = work
        self._timeout_s = timeout_s

    def wait(self) -> I64:
        with _said_clearly(self._timeout_s):
            self._work.wait()
        values: I64 = self._tensor.numpy()
        return values


class GlooLink:
    """Made by all ranks at the same place of their scripts."""

    def __init__(self, ranks: Sequence[int], timeout_s: float = ISLAND_TIMEOUT_S) -> None:
        """`ranks` are numbers of the default group; the first of them speaks."""
        self._timeout_s = timeout_s
        self.rank = list(ranks).index(dist.get_rank())
        self.size = len(ranks)
        self._ranks = list(ranks)
        with _said_clearly(timeout_s):
            self._words, self._work = self._group(), self._group()

    def _group(self) -> Any:
        timeout = timedelta(seconds=self._timeout_s)
        local = self.size < dist.get_world_size()
        return dist.new_group(self._ranks, timeout, "gloo", use_local_synchronization=local)

    def start(self, word: I64) -> GlooWord:
        tensor = torch.from_numpy(word)
        with _said_clearly(self._timeout_s):
            return GlooWord(tensor, dist.all_reduce(tensor, group=self._words, async_op=True), self._timeout_s)

    def tell(self, head: I64) -> None:
        with _said_clearly(self._timeout_s):
            dist.broadcast(torch.from_numpy(head), group_src=SPEAKER, group=self._work)

    def add_up(self, values: I64) -> None:
        with _said_clearly(self._timeout_s):
            dist.all_reduce(torch.from_numpy(values), group=self._work)

    def exchange(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        self._exchange(self._work, sends, receives)

    def exchange_now(self, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        self._exchange(self._beside, sends, receives)

    @cached_property
    def _beside(self) -> Any:
        """A group of the training threads' own: the workers' may be in use. Few need it, so it is made when they do."""
        with _said_clearly(self._timeout_s):
            return self._group()

    def _exchange(self, group: Any, sends: Mapping[int, NDArray[Any]], receives: Mapping[int, NDArray[Any]]) -> None:
        with _said_clearly(self._timeout_s):
            arriving = [dist.irecv(_tensor(a), group_src=r, group=group) for r, a in receives.items()]
            leaving = [dist.isend(_tensor(a), group_dst=r, group=group) for r, a in sends.items()]
            for work in (*arriving, *leaving):
                work.wait()  # type: ignore[union-attr]

    def compare(self, text: str) -> list[str]:
        """Every rank's short text, at all ranks: before there is anything that could go wrong otherwise."""
        own = text.encode()[:TEXT_BYTES_MAX]
        padded = np.zeros(TEXT_BYTES_MAX + 8, np.uint8)
        padded[:8] = np.frombuffer(np.int64(len(own)).tobytes(), np.uint8)
        padded[8 : 8 + len(own)] = np.frombuffer(own, np.uint8)
        found = [torch.zeros(padded.size, dtype=torch.uint8) for _ in range(self.size)]
        with _said_clearly(self._timeout_s):
            dist.all_gather(found, torch.from_numpy(padded), group=self._beside)
        texts = []
        for tensor in found:
            raw = tensor.numpy().tobytes()
            texts.append(raw[8 : 8 + int.from_bytes(raw[:8], "little")].decode(errors="replace"))
        return texts


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    flat = array.reshape(-1).view(np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())


@contextmanager
def _said_clearly(timeout_s: float) -> Iterator[None]:
    try:
        yield
    except (
        RuntimeError,
        ValueError,
    ) as error:  # gloo's own, and a group that was destroyed
        raise cannot_go_on(error, timeout_s) from error
