"""A learner's inner state in torch: optimizer, extras such as schedules and data position, random number generators.

    training thread   capture: a consistent host copy, at a step boundary                                 (taking)
    background        pack: one safetensors blob; unpack: back again, with all of it checked              (blob, giving)
    a new process     restore: into a fresh optimizer and extras, so that training continues bit for bit  (restoring)
    another mesh      reshard: the same optimizer state, cut anew from the parts of all ranks             (resharding)

Tensors are kept as tensors; what holds them becomes a JSON tree, so that nothing is ever pickled. In the tree, None,
bools, strings, lists and finite numbers are themselves. Everything else is an object whose first key says what it is:

    {"dict" | "ordered" | "counter": [[key, value], ...]}     {"tuple": [...]}       {"int": hex}   {"float": hex}
    {"tensor": name, "order": dims?, "as": [dtype, shape]?}    {"array": name, "as": [dtype, shape]}
    {"scalar": hex, "as": dtype}                               {"bytes": hex}         {"dtype": name}

`order` is the order of dimensions in memory of a tensor that is not row-major; `as` tells the type of raw bytes.
"""

from __future__ import annotations

from atoll.learner.inner.blob import pack, parts, read_about, size_of, unpack
from atoll.learner.inner.bundle import optimizer_only, packed_optimizer, unbundle
from atoll.learner.inner.captured import Captured, InnerAbout, OptimizerLike
from atoll.learner.inner.limits import BLOB_BYTES_MAX
from atoll.learner.inner.places import Names, Places, places_of
from atoll.learner.inner.resharding import common_extras, read_target, reshard, target_bytes, target_of
from atoll.learner.inner.restoring import load_saved, restore, restore_optimizer_only
from atoll.learner.inner.taking import capture, keep_extras

__all__ = [
    "BLOB_BYTES_MAX",
    "Captured",
    "InnerAbout",
    "Names",
    "OptimizerLike",
    "Places",
    "capture",
    "common_extras",
    "keep_extras",
    "load_saved",
    "optimizer_only",
    "pack",
    "packed_optimizer",
    "parts",
    "places_of",
    "read_about",
    "read_target",
    "reshard",
    "restore",
    "restore_optimizer_only",
    "size_of",
    "target_bytes",
    "target_of",
    "unbundle",
    "unpack",
]
