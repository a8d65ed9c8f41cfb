"""Several JAX processes as one learner: each has its addressable parts of every array (`atoll.learner.island`).

The processes are those of `jax.distributed`. They find each other through one collective of JAX when the Learner is
made, and talk over connections of Atoll's own from then on: nothing of Atoll is in the way of a training step.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils

from atoll.core import LearnerMachine
from atoll.errors import IslandError, LayoutError
from atoll.jax.checkpoints import PackedPart
from atoll.jax.inner import JaxInner
from atoll.jax.parameters import JaxParameters, Names, Tree, path_name
from atoll.jax.ranks import towards
from atoll.jax.spread import cut_of, indices_of, is_spread
from atoll.learner import (
    TOLD_BYTES_MAX,
    Holdings,
    ParametersLearner,
    RankLink,
    RankParameters,
    RankWatch,
    RunView,
    SocketLink,
    SpeakerSeat,
    build,
    held_runs,
    meet,
)


class SpreadParameters(JaxParameters):
    """The leaves of a tree that is cut over processes (`HeldParameters`). `tree` is of whole arrays, as the loop has
    them; what is read and written is the part of this process."""

    def __init__(self, tree: Tree, *, names: Names | None = None, merge_modes: Mapping[str, str] | None = None) -> None:
        super().__init__(tree, names=names, merge_modes=merge_modes)
        paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
        self._paths = paths
        self._cuts = [cut_of(path, leaf) for path, leaf in zip(paths, self._leaves, strict=True)]

    def _check_places(self, paths: list[str]) -> None:
        for path, leaf in zip(paths, self._leaves, strict=True):
            processes = {device.process_index for device in leaf.sharding.device_set}
            if len(processes) != jax.process_count():
                raise LayoutError(
                    f"leaf {path!r} is on {len(processes)} of {jax.process_count()} processes, and others are on more; "
                    "put every leaf on the mesh of all of them (jax.device_put with a NamedSharding; PartitionSpec() "
                    "has it whole everywhere), or start a jax.distributed world of its own for each learner"
                )

    def _here(self, index: int) -> Any:
        return self._cuts[self._order[index]].here(self._leaf(index))

    def _put(self, index: int, here: Any) -> None:
        self._leaves[self._order[index]] = self._cuts[self._order[index]].whole(here)

    def _check_cut(self, path: int, old: Any, new: Any) -> None:
        """A compiler may cut an array otherwise over the devices of one process, but not over processes."""
        if new.sharding is old.sharding or new.sharding.is_equivalent_to(old.sharding, old.ndim):
            return
        name = self._paths[path]
        if not is_spread(new) or self._boxes(name, new) != self._boxes(name, old):
            raise LayoutError(
                f"leaf {name!r} was {old.sharding.spec} and is {new.sharding} now; in a learner of several processes "
                "each keeps what it has: give your jitted step out_shardings, or use jax.lax.with_sharding_constraint"
            )
        self._cuts[path] = cut_of(name, new)

    def _boxes(self, name: str, leaf: Any) -> list[list[list[int]]]:
        return [
            [index.tolist() for index in indices_of(name, leaf.sharding, leaf.shape, p)]
            for p in range(jax.process_count())
        ]

    @property
    def mesh(self) -> Any:
        return self._leaves[0].sharding.mesh

    def reshard(self) -> None:
        """JAX keeps no copies."""

    def holdings(self) -> Holdings:
        return Holdings(self.specs, tuple(self._runs(index) for index in range(len(self.specs))))

    def _runs(self, index: int) -> tuple[Any, ...]:
        leaf, path = self._leaf(index), self._paths[self._order[index]]
        runs = []
        for process in range(jax.process_count()):
            along = indices_of(path, leaf.sharding, leaf.shape, process) or (np.arange(1),)
            runs.append(held_runs(self.specs[index].shape, along[::-1] if self._transposed[index] else along))
        return tuple(runs)

    def fingerprint(self) -> dict[str, str]:
        """What must be the same in all processes, by what a person calls it."""
        tensors = [[s.name, s.shape, s.dtype, s.merge] for s in self.specs]
        cuts = [[str(leaf.sharding.spec), dict(leaf.sharding.mesh.shape)] for leaf in self._leaves]
        digests = [hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16] for value in (tensors, cuts)]
        return {
            "version of atoll": build(),
            "type of device": jax.default_backend(),
            "model": f"{len(tensors)} leaves, {digests[0]}",
            "sharding": digests[1],
        }


def is_island(params: Tree) -> bool:
    """Whether some of it is cut over processes."""
    return any(is_spread(leaf) for leaf in jax.tree_util.tree_leaves(params))


def rank_parameters(
    params: Tree, names: Names | None, merge_modes: Mapping[str, str] | None, address: str | None, timeout_s: float
) -> tuple[RankParameters, SpreadParameters, SocketLink]:
    """This process's parameters and its link to the others; all of them together."""
    _apart.append(True)  # until they part in order
    tell = partial(_tell, timeout_s)
    link = SocketLink(jax.process_index(), jax.process_count(), tell, towards=towards(address), timeout_s=timeout_s)
    found: list[SpreadParameters] = []

    def look() -> Mapping[str, str]:
        found.append(SpreadParameters(params, names=names, merge_modes=merge_modes))
        return found[0].fingerprint()

    meet(link, look)
    holdings = found[0].holdings()
    holdings.check()
    ranks = RankParameters(found[0], holdings, link.rank, link.exchange, link.exchange_now)
    return ranks, found[0], link


def _tell(timeout_s: float, own: bytes) -> list[bytes]:
    """Every process's bytes, by JAX's own means. Some of its collectives wait for ever, so a thread waits for them."""
    padded = np.zeros(TOLD_BYTES_MAX, np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    found: Future[Any] = Future()

    def gather() -> None:
        try:
            found.set_result(multihost_utils.process_allgather(padded))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=gather, name="atoll-meet", daemon=True).start()
    try:
        rows = np.asarray(found.result(timeout_s)).reshape(-1, TOLD_BYTES_MAX)
    except (TimeoutError, RuntimeError) as error:  # JAX's own errors are of the latter kind
        raise IslandError(
            f"the {jax.process_count()} processes of this learner did not meet ({_said(error, timeout_s)}); make the "
            "atoll.jax.Learner in every process, of arrays that are on the mesh of all of them"
        ) from None
    return [row.tobytes().rstrip(b"\0") for row in rows]


def _said(error: Exception, timeout_s: float) -> str:
    return f"one has not come for {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)[:200]


_apart: list[bool] = []
"""One for each learner whose processes have not parted in order."""
CANDIDATES_MAX = 4
"""Checkpoints that are tried: the newest, and older ones in case that it does not fit."""
LINGER_S = 5.0
"""JAX ends all others at once when process 0 is gone: time for them to say what they have to say."""


def _end_alone() -> None:
    """Has a process that dies of an exception end now: JAX would let it wait for the others first, for 5 minutes, who
    wait for it. Made right after `import jax`, so that of all that is done at the end only JAX's own part is left."""
    if _apart and getattr(sys, "last_type", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER_S if jax.process_index() == 0 else 0)
        os._exit(1)


atexit.register(_end_alone)


class SpreadLearner(ParametersLearner):
    """A ParametersLearner whose optimizer state is kept in parts, one by each process."""

    _watch: RankWatch | None = None

    def start(self) -> Self:
        if isinstance(self._link, SocketLink):
            self._watch = self._link.watch()
        return super().start()

    def close(self, *, flush: bool = True, reason: str = "finished") -> None:
        if self._watch is None or self.closed:
            super().close(flush=flush, reason=reason)
            return
        assert isinstance(self._link, SocketLink)
        self._watch.rest()
        in_order = False
        try:
            super().close(flush=flush, reason=reason)
            in_order = flush and self._shell.failure is None
        finally:
            if in_order:
                _apart.pop()
            else:
                self._link.close()

    def _recover_together(self, link: RankLink) -> str:
        inner = self._inner
        assert isinstance(inner, JaxInner)
        if isinstance(self._seat, SpeakerSeat):
            self._seat.capture_due = lambda: inner.due
        return recover_together(link, inner, self._machine)


def recover_together(link: RankLink, inner: JaxInner, machine: LearnerMachine | RunView) -> str:
    """All processes continue from their checkpoints of one step, or none does."""
    step, run = link.compare(f"{machine.step} {machine.run}")[0].split(" ", 1)
    if isinstance(machine, RunView):
        machine.run = run
    before, why = inner.state, ""
    for parts in _candidates(link, inner):
        restored = inner.restore(parts)
        told = link.compare("" if restored else inner.detail[:500])
        if not any(told):
            return "checkpoint"
        why = why or next(text for text in told if text)
        inner.forget(before)
    if step == "0":
        return "fresh"
    inner.detail = why
    inner.warm_up()
    return "parameters"


def _candidates(link: RankLink, inner: JaxInner) -> Iterator[Sequence[PackedPart]]:
    """Checkpoints to be tried, newest first, the same ones in all processes: what each has left itself, as one of so
    many; and where all of them see the same folder, what so many processes have left that may have been others."""
    own, sets = inner.own(), {one.key: one for one in inner.sets()}
    told = [[tuple(key) for key in json.loads(text)] for text in link.compare(json.dumps(list(own)))]
    common = {(*key, link.size) for key in set(told[0]).intersection(*told[1:])}
    if len(set(link.compare(json.dumps(list(sets))))) > 1:
        sets = {}
    for key in sorted(common | sets.keys(), reverse=True)[:CANDIDATES_MAX]:
        if key in common:
            yield [own[key[:2]]]
        if key in sets:
            yield sets[key].parts
