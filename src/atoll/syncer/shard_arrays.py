"""A shard's arrays and their disk: what a coordinator has it do with them.

A shard keeps its slots as a syncer does (`store`), and beside them one row on its tape: its name, the run, and the
epoch of the coordinator that led it last. What a coordinator leaves in memory (contributions, a merge that was not
committed) is gone when the next one attaches; what is on disk is not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.core import (
    SECOND_NS,
    ContributionId,
    ContributionRecord,
    Refusal,
    SyncConfig,
    TensorSpec,
    VersionToStore,
    build_layout,
)
from atoll.core import effects as fx
from atoll.errors import AtollError, RefusedError
from atoll.observe import Writer
from atoll.store import Loaded, RunStore, open_store
from atoll.syncer import shard_calls as calls
from atoll.syncer.fragment_work import (
    compare_contributions,
    copy_theta,
    heal_fragment,
    merge_contributions,
    store_version,
)
from atoll.syncer.log_replay import replay_log
from atoll.syncer.recover import SHARD_ROW
from atoll.syncer.relay_calls import wanted_for
from atoll.syncer.relay_peers import AtRelay, Gathered, Held, Lost, RelayPeers
from atoll.syncer.shard_moves import FragmentMoves
from atoll.syncer.state import InspectedPayload, ModelState
from atoll.syncer.state_writer import StateWriter

T = TypeVar("T")
WORKERS = 2
"""As in the syncer: the kernels have threads of their own, two keep them fed."""
NAME_BYTES = 4
LED_ANEW = "a syncer is about to lead this shard anew; ask again"


class ShardArrays:
    """Everything here runs on the event loop; array work and the disk on threads."""

    def __init__(self, folder: Path | None, writer: Writer, *, take_over: bool = False) -> None:
        self.state: ModelState | None = None
        self.copies: OrderedDict[int, tuple[int, int, memoryview]] = OrderedDict()
        self.held: dict[ContributionId, InspectedPayload] = {}
        """Contributions that the coordinator has accepted, or is asked about."""
        self.heals: dict[tuple[int, str], NDArray[np.uint8]] = {}
        """Whole fragments that learners have brought back, by fragment and learner."""
        self.moves = FragmentMoves(self)
        self.relays = RelayPeers()
        self._folder = folder
        self._writer = writer
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="atoll-shard")
        self._loop = asyncio.get_running_loop()
        self._keeper: StateWriter | None = None
        self._store: RunStore | None = None
        self._loaded = Loaded()
        self._handed: list[tuple[ContributionRecord, NDArray[np.uint8]]] = []
        self._used = False
        """What an earlier coordinator left in memory is to be let go."""
        self._open(take_over)
        self.row: dict[str, Any] = {
            "name": secrets.token_hex(NAME_BYTES),
            "run": "",
            "epoch": 0,
            "instance": "",
            **self._loaded.rows.get(SHARD_ROW, {}),
        }

    @property
    def keeper(self) -> StateWriter:
        """Raises RefusedError where another syncer has attached while work for the one before was under way."""
        if self._keeper is None:
            raise RefusedError(Refusal.BUSY, LED_ANEW)
        return self._keeper

    async def on_a_worker(self, function: Callable[..., T], *arguments: Any) -> T:
        return await self._loop.run_in_executor(self._workers, function, *arguments)

    async def look_around(self) -> None:
        """Raises FencedSyncerError if another shard has taken this folder over."""
        if self._keeper is not None:
            await self._keeper.look_around()

    def close(self) -> None:
        self._workers.shutdown(wait=True)
        if self._keeper is not None and self.state is not None:
            self._keeper.fill_slots(self.state)
        self._close_disk(self._keeper)

    # ------------------------------------------------------------ the disk

    def _open(self, take_over: bool) -> None:
        """Open the state under a new epoch of this folder, and read it."""
        if self._folder is not None:
            self._store = open_store(self._folder / "state", take_over=take_over)
            self._loaded = replay_log(self._store.load() or Loaded())

    def _reopen(self, keeper: StateWriter | None) -> None:
        """Back to what is on disk."""
        self._close_disk(keeper)
        self._loaded = Loaded()
        self._open(take_over=False)

    def _close_disk(self, keeper: StateWriter | None) -> None:
        """The keeper closes the store that it was given."""
        kept = keeper is not None and keeper.level != "none"
        if keeper is not None:
            keeper.close()
        if self._store is not None and not kept:
            self._store.close()
        self._store = None

    def _remember(self) -> None:
        if self._store is not None:
            self._store.remember({SHARD_ROW: self.row})
            self._store.sync()

    async def remember(self) -> None:
        """Whose fragments these are, before any of them is written."""
        await asyncio.to_thread(self._remember)

    # ------------------------------------------------------------ a coordinator comes

    async def attach(self, values: Mapping[str, Any], *, unled: bool = False) -> dict[str, Any]:
        """Be led by this coordinator from here on. Says what is on disk here. Raises RefusedError if it may not.
        `unled`: the one before is gone. With durability none its run went with it, and must not keep a new one from
        beginning here."""
        self._check_leader(values)
        if not (unled and self._keeper is not None and self._keeper.level == "none"):
            self._check_run(str(values["run"]))  # before anything that its own run needs is let go
        self._used = self._used or self.state is not None or self._keeper is not None
        if self._used:
            # Off the loop's hands first: whoever looks around meanwhile must not meet a keeper that is closing.
            keeper, self._keeper = self._keeper, None
            # A syncer that goes away while this waits must not leave a run here that nobody is the one of: with
            # durability none no other was ever taken again (draw 7, seed 3138).
            self.state = None
            await asyncio.to_thread(self._reopen, keeper)
            self._used = False
        self.state, self.held, self.heals = None, {}, {}
        self.moves.forget()
        self.relays.close("another syncer leads this shard")
        self.copies.clear()
        self._check_run(str(values["run"]))
        self.row |= {"epoch": int(values["epoch"]), "instance": str(values["instance"])}
        await self.remember()
        level = str(values["level"])
        if level == "none":
            self._loaded = Loaded()
        elif self._store is None:
            raise RefusedError(
                Refusal.NOT_ALLOWED,
                f"the run's durability is {level}, and this shard has no place on disk; start it with --run-folder, or "
                "the syncer with --durability none",
            )
        self._keeper = StateWriter(
            self._store if level != "none" else None,
            level,
            float(values["interval_s"]),
            self._writer,
            record=bool(values["record"]),
        )
        handed, payloads, problems = self._keeper.load_handed()
        self._handed = [(one.contribution, payloads[one.contribution.id]) for one in handed]
        fragments = self._loaded.fragments if self.row["run"] == values["run"] else {}
        self._loaded.fragments = fragments
        return {
            "name": self.row["name"],
            "run": self.row["run"],
            "fragments": {str(f): one.meta for f, one in fragments.items()},
            "handed": [[calls.record_values(one.contribution), one.processed] for one in handed],
            "problems": [*self._loaded.problems, *problems],
        }

    def _check_leader(self, values: Mapping[str, Any]) -> None:
        if values.get("link") != calls.LINK_VERSION:
            raise RefusedError(
                Refusal.PROTOCOL, "the syncer is of another version than this shard; install the same on both sides"
            )
        epoch, instance = int(values["epoch"]), str(values["instance"])
        known = int(self.row["epoch"]) if self.row["run"] and self.row["run"] == values["run"] else 0
        if epoch < known or (epoch == known and instance != self.row["instance"]):
            raise RefusedError(
                Refusal.STALE_EPOCH,
                f"shard {self.row['name']} is led by a newer syncer of this run (epoch {known}; this one is {epoch}); "
                "let the older one end",
            )

    def _check_run(self, run: str) -> None:
        """A run is more than its first parameters: what never got further may be forgotten."""
        versions = [one.version for one in self._loaded.fragments.values()]
        if self.state is not None and self.state.fragments:
            versions += [self.state.fragments[fragment].version for fragment in self.state.owned]
        trained = any(version > 0 for version in versions)
        if trained and self.row["run"] != run:
            wants = f"the syncer continues run {run}" if run else "the syncer begins a new run"
            raise RefusedError(
                Refusal.NOT_ALLOWED,
                f"shard {self.row['name']} holds fragments of run {self.row['run']}, and {wants}; start the syncer on "
                "the run folder (or --snapshots) of that run, or this shard on an empty folder",
            )

    def lay_out(self, values: Mapping[str, Any]) -> None:
        """The model is known, and which of its fragments are here. With `restore` they come from the disk, and what is
        not there from learners; else from a seed."""
        tensors = [TensorSpec(name, tuple(shape), dtype, merge) for name, shape, dtype, merge in values["tensors"]]
        config = SyncConfig.from_dict(values["config"])
        layout = build_layout(tensors, config.fragments)
        state = ModelState(layout, config, owned=[int(f) for f in values["owned"]])
        self.row["run"] = str(values["run"])
        recorder = self.keeper.recorder
        if values["restore"]:
            loaded = {f: one for f, one in self._loaded.fragments.items() if f in state.owned}
            state.restore({f: (one.version, int(one.meta["checksum"]), one.arrays) for f, one in loaded.items()})
            self.keeper.begin(self.row["run"], config, layout)
            recorder.resume({f: one.meta for f, one in loaded.items()})
            self.held = {one.id: self._inspect_handed(state, one, data) for one, data in self._handed}
        self._loaded, self._handed = Loaded(), []
        self.state = state
        self.copies.clear()

    @staticmethod
    def _inspect_handed(state: ModelState, item: ContributionRecord, payload: NDArray[np.uint8]) -> InspectedPayload:
        try:
            return state.inspect(item.id.fragment, payload, item.codec)[1]
        except AtollError as error:
            raise RefusedError(
                Refusal.CODEC,
                f"what {item.id.learner!r} handed over when it left cannot be read ({error}); start the syncer with "
                "the --codec-up that the run had",
            ) from error

    # ------------------------------------------------------------ what is done with them

    async def _remember_for_leader(self) -> ModelState:
        """Raises RefusedError where another syncer has come meanwhile: what the one before wanted is nobody's."""
        state = self.state
        await self.remember()
        if state is None or self.state is not state:
            raise RefusedError(Refusal.BUSY, LED_ANEW)
        return state

    async def commit_seed(self) -> dict[str, int]:
        state = await self._remember_for_leader()
        checksums = await self.on_a_worker(state.commit_seed)
        self.keeper.begin(self.row["run"], state.config, state.layout)
        return {str(f): checksums[f] for f in sorted(state.owned)}

    async def compare(self, compare: fx.Compare) -> dict[str, float]:
        return dict((await compare_contributions(self, compare, self._given(compare.contributions))).cosines)

    async def merge(self, merge: fx.Merge, at: Sequence[calls.At]) -> dict[str, Any]:
        """What relays hold comes first, from them; what is lost with one is told before anything is merged."""
        if not any(at):
            done = await merge_contributions(self, merge, self._given(merge.contributions))
            return calls.finished_values(done, 0)
        before, state = self.relays.bytes_up, self.state
        gathered = await self._gather(merge, at)
        if self.state is not state:
            raise RefusedError(Refusal.BUSY, LED_ANEW)
        bytes_up = self.relays.bytes_up - before
        if isinstance(gathered, tuple):
            return calls.finished_values(fx.MergeFinished(merge.fragment, finite=False, lost=gathered), bytes_up)
        return calls.finished_values(await merge_contributions(self, merge, gathered.held, gathered), bytes_up)

    async def _gather(self, merge: fx.Merge, at: Sequence[calls.At]) -> Gathered | Lost:
        state, peers = self.state, [None if where is None else self.relays.find(where[0]) for where in at]
        assert state is not None
        pairs = list(zip(merge.contributions, at, peers, strict=True))
        if lost := tuple(one for one, where, peer in pairs if where is not None and peer is None):
            return lost
        held: list[Held] = [
            self._given((one,))[0] if where is None or peer is None else AtRelay(peer, where[1])
            for one, where, peer in pairs
        ]
        return await self.relays.gather(state, wanted_for(merge, self._within_s), held)

    @property
    def _within_s(self) -> float:
        assert self.state is not None
        return self.state.config.quorum_timeout_ns / SECOND_NS

    async def heal(self, heal: fx.CommitHealed, learner: str, rounds: int) -> None:
        payload = self.heals.get((heal.fragment, learner))
        if payload is None:
            raise RefusedError(Refusal.UNKNOWN_VERSION, f"{learner!r} has brought no fragment {heal.fragment} here")
        await self._remember_for_leader()
        await heal_fragment(self, heal, payload, rounds)
        self.heals = {key: one for key, one in self.heals.items() if key[0] != heal.fragment}

    async def store(self, item: VersionToStore) -> dict[str, Any]:
        """What came back from the disk meanwhile must not be written under a newer version's name (draw 7, seed
        1402)."""
        assert self.state is not None
        here = self.state.fragments[item.fragment]
        if (here.version, here.checksum) != (item.version, item.checksum):
            detail = f"this shard has version {here.version} of fragment {item.fragment}, not {item.version}"
            raise RefusedError(Refusal.UNKNOWN_VERSION, detail)
        return asdict(await store_version(self, item))

    async def keep_handed(self, values: Mapping[str, Any]) -> bool:
        """Put what a leaving learner handed over on disk. True if it has come here from a relay for that: nobody can
        give it again."""
        record, at = calls.record_of(values["item"]), values["at"]
        brought = False
        if at is not None and self.state is not None and (peer := self.relays.find(at[0])) is not None:
            item = await self.relays.whole(self.state, record.id, AtRelay(peer, float(at[1])), self._within_s)
            brought = item is not None
            if item is not None:
                self.held[record.id] = item
        items = [(record, self.held[record.id].payload)] if record.id in self.held else []
        await self.keeper.keep_handed(items, int(values["processed"]))
        return brought

    async def copy(self, fragment: int) -> tuple[dict[str, Any], memoryview]:
        """Every array of a fragment, one behind the other. The caller sees to it that nobody changes them meanwhile."""
        assert self.state is not None
        named = self.state.durable(fragment)
        joined = await self.on_a_worker(lambda: np.concatenate([array.view(np.uint8) for array in named.values()]))
        arrays = self.state.fragments[fragment]
        return {"version": arrays.version, "names": list(named), "size": arrays.theta.size}, joined.data

    async def copy_theta(self, fragment: int) -> None:
        await copy_theta(self, fragment)

    def forget(self, identity: ContributionId) -> None:
        """A contribution was merged, or will never be."""
        self.held.pop(identity, None)
        self.keeper.drop_handed(identity)

    def _given(self, contributions: tuple[ContributionId, ...]) -> list[InspectedPayload]:
        missing = [one for one in contributions if one not in self.held]
        if missing:
            raise RefusedError(Refusal.UNKNOWN_VERSION, f"{missing[0]} is not on this shard")
        return [self.held[one] for one in contributions]
