"""Learners of several processes on this machine: torchrun around the user's command, and who gets which GPU."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from atoll.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
RANKS_MAX = 1024
"""Of one learner on one machine."""


def island_argv(command: Sequence[str], ranks: int) -> list[str]:
    """The command as `ranks` processes of one torch.distributed world. A rank that dies ends the others, and torchrun;
    the launcher starts all of them again, as the learner's next generation. Ranks have sessions of their own, so each
    is told to die with torchrun (`rank`)."""
    if ranks == 1:
        return list(command)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*torchrun, "--no-python", sys.executable, "-m", "atoll.launch.rank", *command]


def gpus_here() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes; asked of nobody but the kernel,
    because importing torch would take seconds."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip() not in ("", "-1")]
    numbers = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((number for number in numbers if number.isdigit()), key=int)


def gpu_shares(gpus: Sequence[str], *, learners: int, ranks: int, per_learner: int = 0) -> list[Mapping[str, str]]:
    """What each learner's environment says of GPUs. `per_learner` 0: one for each rank."""
    if not gpus and not per_learner:
        return [{}] * learners
    wanted = per_learner or ranks
    if learners * wanted <= len(gpus):
        shares = [gpus[index * wanted : (index + 1) * wanted] for index in range(learners)]
    elif wanted == 1 and not per_learner:
        shares = [[gpus[index % len(gpus)]] for index in range(learners)]  # several small learners share one
    else:
        raise ConfigError(
            f"{learners} learners with {wanted} GPUs each need {learners * wanted}, and this machine has {len(gpus)}; "
            "use fewer --learners, --ranks or --gpus-per-learner, or CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    return [{VISIBLE: ",".join(share)} for share in shares]


def gpu_share(number: int, *, ranks: int, per_learner: int = 0) -> Mapping[str, str]:
    """What the environment of the learner of this number says, one that comes later included: the share that it would
    have had if it had been there from the beginning."""
    return gpu_shares(gpus_here(), learners=number + 1, ranks=ranks, per_learner=per_learner)[number]
