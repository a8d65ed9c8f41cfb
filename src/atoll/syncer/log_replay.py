"""From slots and log to the versions that were committed last: the merges of the log are done again, under the settings
that they were made with, and every checksum is compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atoll.core import SyncConfig, TensorSpec, build_layout
from atoll.errors import AtollError, PayloadError
from atoll.store import Loaded, LoadedFragment, LoggedMerge, read_state
from atoll.syncer.state import ModelState


def read_committed(state: Path, *, only: tuple[str, ...] | None = None) -> Loaded:
    """What was committed last in a state folder, read-only. `only` names the arrays that are wanted."""
    loaded = read_state(state, only=only)
    if loaded.logged:
        loaded = replay_log(read_state(state))
    return loaded


def replay_log(loaded: Loaded) -> Loaded:
    """Bring every fragment to the last version that its log leads to; what cannot be had is named, and the version
    before it is used."""
    for fragment, merges in sorted(loaded.logged.items()):
        slot = loaded.fragments[fragment]
        try:
            loaded.fragments[fragment], fault = _replayed(fragment, slot, merges)
        except (AtollError, LookupError, TypeError, ValueError) as error:
            fault = f"the log of fragment {fragment} cannot be followed ({error})"
        if fault:
            used = loaded.fragments[fragment].version
            loaded.problems.append(f"{fault}; version {used} of fragment {fragment} is used")
    loaded.logged = {}
    return loaded


def _replayed(fragment: int, slot: LoadedFragment, merges: list[LoggedMerge]) -> tuple[LoadedFragment, str]:
    """As far as checksums agree. A merge that turns out wrong has changed the arrays, so that those before it are then
    done once more."""
    at, fault = _try(fragment, slot, merges)
    if fault:
        at, _ = _try(fragment, slot, merges[: at.version - slot.version])
    return at, fault


def _try(fragment: int, slot: LoadedFragment, merges: list[LoggedMerge]) -> tuple[LoadedFragment, str]:
    state = _state_of(merges[0].about, fragment) if merges else None
    at = slot
    if state is None:
        return at, ""
    copies = {name: array.copy() for name, array in slot.arrays.items()}
    state.restore({fragment: (slot.version, int(slot.meta["checksum"]), copies)})
    for merge in merges:
        try:
            held = [state.inspect(fragment, payload, codec)[1] for codec, payload in merge.payloads()]
        except PayloadError as error:
            return at, f"version {merge.version} of fragment {fragment} cannot be made again: {error}"
        codec_down, arrays = str(merge.meta.get("codec_down", "")), state.fragments[fragment]
        result = state.merge(fragment, held, merge.weights, codec_down=codec_down)
        if not result.finite or arrays.checksum != merge.meta["checksum"]:
            return at, f"version {merge.version} of fragment {fragment}, made again, is not what it was"
        at = LoadedFragment(merge.version, merge.meta, state.durable(fragment), slot.epoch, slot.sequence)
    return at, ""


def _state_of(about: dict[str, Any], fragment: int) -> ModelState:
    tensors = [TensorSpec(str(n), tuple(map(int, s)), str(d), str(m)) for n, s, d, m in about["tensors"]]
    config = SyncConfig.from_dict(about["config"])
    return ModelState(build_layout(tensors, int(about["fragments"])), config, owned=[fragment])
