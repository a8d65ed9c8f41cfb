"""What a run cannot see of a learner's model: parameters that change hands after joining, and frozen ones that differ.

The parameters of a run are fixed when it begins. One that is unfrozen, added or replaced later is trained by its own
learner alone, and the published model does not have it. Nothing breaks, so somebody must look.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import nn

from atoll.learner.names import named_parameters

FIRST_STEPS = 5
"""After each of the first steps the model is looked through: scripts change it at their beginning, if at all."""
LOOK_STEPS = 50
LOOK_S = 10.0
"""Later it is looked through after so many steps or seconds, whichever comes first. That takes a microsecond or two
for each parameter tensor, which a training step handles for tens of them."""
NAMES_TOLD = 5
"""Names that a warning lists of each kind."""
SAMPLE_ELEMENTS = 1024
"""Of each frozen tensor, spread over it: other weights differ nearly everywhere, and a thousand tensors of any size are
hashed in a tenth of a second."""


class ModelWatch:
    """The parameters of a model as they were when it joined. Used by the training thread."""

    def __init__(self, model: nn.Module, synced: Iterable[str], *, identities: bool = True) -> None:
        """`synced` are the plain names that the run knows. Without `identities` a parameter may be another object under
        the same name: FSDP puts gathered ones and this rank's parts in each other's place."""
        self._model = model
        self._synced = frozenset(synced)
        self._known = dict(named_parameters(model))  # held, so that an identity stays its own
        self._identities = identities
        self._told: set[str] = set()
        self._seen = self._glance()
        self._steps = 0
        self._early = FIRST_STEPS
        self._next_s = time.monotonic() + LOOK_S

    def stepped(self) -> str:
        """At a step boundary: what has changed since the model joined, once; else nothing."""
        self._steps, self._early = self._steps + 1, self._early - 1
        if self._early < 0 and self._steps < LOOK_STEPS and time.monotonic() < self._next_s:
            return ""
        return self.look()

    def look(self) -> str:
        """The same, now: a short run would end before the next time."""
        self._steps, self._next_s = 0, time.monotonic() + LOOK_S
        seen = self._glance()
        if seen == self._seen:
            return ""
        self._seen = seen
        return self._compare()

    def _glance(self) -> list[tuple[str, int, bool]]:
        one = id if self._identities else (lambda _: 0)
        return [(name, one(p), p.requires_grad) for name, p in self._model.named_parameters()]

    def _compare(self) -> str:
        now = dict(named_parameters(self._model))
        kinds: dict[str, list[str]] = {"unfrozen": [], "added": [], "replaced": []}
        for name, parameter in now.items():
            if name not in self._synced and parameter.requires_grad:
                kinds["unfrozen" if name in self._known else "added"].append(name)
            elif self._identities and name in self._synced and self._known[name] is not parameter:
                kinds["replaced"].append(name)
        kinds["missing"] = [name for name in self._synced if name not in now]
        news = {kind: sorted(set(names) - self._told) for kind, names in kinds.items()}
        self._told.update(*news.values())
        parts = [f"{kind}: {_some(names)}" for kind, names in news.items() if names]
        return f"the model was changed after this learner joined ({'; '.join(parts)}); {REMEDY}" if parts else ""


REMEDY = (
    "what a run trains is fixed when it begins, so this is not sent to anybody and is in no published model; make the "
    "model as it is to be trained before the Learner is made, in every learner, and start a new run"
)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_TOLD} more" if len(names) > NAMES_TOLD else ""
    return ", ".join(map(repr, names[:NAMES_TOLD])) + more


Pick = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a tensor and places in it, flattened, to the values there."""


def frozen_checksum(model: nn.Module, pick: Pick = lambda parameter, places: parameter.detach().take(places)) -> int:
    """Of the frozen parameters: names, shapes, types and a sample of the values; 0 if there are none. `pick` is how
    processes that hold parts of them find the values of the whole: the sample is then the one of a single process."""
    frozen = [(name, p) for name, p in named_parameters(model) if not p.requires_grad]
    if not frozen:
        return 0
    hasher = xxhash.xxh3_64()
    for name, parameter in frozen:
        hasher.update(f"{name} {parameter.dtype} {list(parameter.shape)}\n".encode())
        hasher.update(_sample(parameter, pick))
    return hasher.intdigest() or 1


@torch.no_grad()
def _sample(parameter: torch.Tensor, pick: Pick) -> bytes:
    try:
        stride = max(1, parameter.numel() // SAMPLE_ELEMENTS)
        places = torch.arange(0, parameter.numel(), stride, device=parameter.device)[:SAMPLE_ELEMENTS]
        return pick(parameter, places).cpu().view(torch.uint8).numpy().tobytes()
    except (RuntimeError, TypeError, NotImplementedError):  # on the meta device, quantised, or of a library's own kind
        return b""
