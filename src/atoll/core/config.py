"""The settings of the synchronisation: one frozen dataclass that the syncer owns and every learner receives.

Synchronous DiLoCo, Streaming DiLoCo and the fully asynchronous form are settings of the same machine:

    synchronous   quorum="all", grace_cap_steps=0, overlap=0      learners wait at the boundary for the merge
    streaming     quorum="all", overlap=tau > 0                   the merge is hidden behind tau steps
    decoupled     quorum=1 .. "50%" .. with grace, overlap > 0    nobody waits for anybody
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

from atoll.core.pacing import PACING
from atoll.core.registry import Registry
from atoll.errors import ConfigError

SECOND_NS = 1_000_000_000
TIMEOUT_NS_MAX = 10**18
"""Thirty years."""

# What stands behind these names is arithmetic, of which this room knows nothing: `atoll.codec` says what each must be.
CODECS: Registry[Any] = Registry(
    "codec",
    {
        "fp32": "atoll.codec.fp32:FP32",
        "bf16": "atoll.codec.bf16:BF16",
        "int8": "atoll.codec.int8:INT8",
        "int4": "atoll.codec.int4:INT4",
        "int2": "atoll.codec.int2:INT2",
    },
    families={"topk": "atoll.codec.topk:topk", "lowrank": "atoll.codec.lowrank:lowrank"},
)
MERGES: Registry[Any] = Registry(
    "merge method",
    {
        "half-rda": "atoll.codec.merges.half_rda:HALF_RDA",
        "rda": "atoll.codec.merges.rda:RDA",
        "mean": "atoll.codec.merges.mean:MEAN",
    },
)
OUTERS: Registry[Any] = Registry(
    "outer optimizer",
    {
        "nesterov": "atoll.codec.outer.nesterov:NESTEROV",
        "delayed": "atoll.codec.outer.delayed:DELAYED",
        "rownorm": "atoll.codec.outer.rownorm:ROWNORM",
    },
)
TENSOR_MERGES = ("rda", "mean")
"""Of a tensor by itself: as the run's setting says, or always the mean. (They are called as in the first release.)"""
WEIGHTS = ("tokens2_per_step", "tokens", "uniform")
CORRECTIONS = ("none", "heloco")
OUTER_SCHEDULES = ("constant", "linear", "cosine")
PARTIALS = ("scaled", "full")
SIZES = ("confirmed", "claimed")
ROBUSTS = ("off", "cosine", "trimmed")
ADAPTIVES = ("off", "on", "network", "learning")
LADDER_MAX = 16
"""Codecs that a run may choose from: there are not so many that differ."""
FRAGMENTS_MAX = 4096
"""More fragments than this only add overhead: at 100B parameters one would still be 24M parameters."""
LEARNERS_MAX = 1_000_000
SYNC_EVERY_MAX = 1_000_000
MOMENTUM_RESTART_MAX = 1_000_000_000
LATER_SETTINGS: Mapping[str, Any] = {
    "feedback_up": True,
    "feedback_down": True,
    "correction": "none",
    "outer_schedule": "constant",
    "momentum_restart": 0,
    "partial": "full",
    "pacing": "fixed",
    "outer": "nesterov",
    "sizes": "claimed",
    "share_max": 1.0,
    "robust": "off",
    "adaptive": "off",
    "period_min": 4,
    "period_max": 64,
    "codec_ladder": "",
}
"""Settings that came after the first release, whose code refuses names that it does not know, and what its code does.
`to_dict` leaves them out where they say just that and it is the default, so that older learners take part as long as
nothing new is used; whoever reads a record of an older version adds them."""

EARLIER_DEFAULTS: Mapping[str, Any] = {
    **LATER_SETTINGS,
    "sync_every": 24,
    "merge": "rda",
    "outer_lr": 0.7,
    "outer_momentum": 0.5,
    "carry_versions_max": 4,
}
"""Where 0.1 to 0.3 had other defaults, or no choice: a syncer of theirs kept no settings with the run."""


@dataclass(frozen=True, slots=True)
class SyncConfig:
    """How the run synchronises. Letters in parentheses are those of the paper."""

    sync_every: int = 8
    """Inner steps between two rounds of the same fragment (H)."""
    fragments: int = 0
    """Number of fragments (P). 0: chosen from the model's size when the first learner joins, at most 24 and H."""
    overlap: int = 2
    """Inner steps that a round may take while training goes on (tau). 0: learners wait for each merge (synchronous)."""
    quorum: str = "50%"
    """Contributions that close a round (K): a number, a share of active learners ("50%"), or "all"."""
    learners_expected: int = 1
    """With quorum "all" or a share, rounds wait until this many learners have joined once."""
    grace_cap_steps: float = 1.0
    """Longest wait for more contributions after the quorum, in inner steps. 0 switches the grace window off."""
    grace_gamma: float = 0.8
    """Share of the measured slack that the grace window may use."""
    weights: str = "tokens2_per_step"
    """Weight of a contribution: tokens2_per_step (the paper's), tokens, or uniform."""
    sizes: str = "confirmed"
    """Tokens per step that count for weights and budget: confirmed (what was declared with a learner's key, or is like
    the others', or was shown over some periods) or claimed (whatever a learner says)."""
    share_max: float = 1.0
    """The most that one learner may weigh in a merge with others, as a share of the whole. 1.0: no such limit."""
    age_discount: float = 1.0
    """A contribution's weight is multiplied by this once per version of age. 1.0: no discount."""
    merge: str = "half-rda"
    """How long a merged step is: mean (as long as what the learners agree on), rda (radial-directional averaging: as
    long as their own steps) or half-rda (half way between). Embedding-like tensors always take the mean."""
    outer_lr: float = 0.7
    """Learning rate of the outer step."""
    outer_momentum: float = 0.3
    """Momentum of the outer step."""
    codec_up: str = "int4"
    """Encoding of contributions: fp32, bf16, int8, int4, int2, topk:SHARE%, lowrank:RANK, or a registered one."""
    codec_down: str = "int4"
    """Encoding of published updates: fp32, bf16, int8, int4, int2, topk:SHARE%, lowrank:RANK, or a registered one."""
    adopt: str = "rebase"
    """What a learner does with a published version: rebase, overwrite, or mix:ALPHA, which keeps ALPHA of its own
    parameters and takes 1 - ALPHA of the published ones (mix:1 takes none)."""
    carry_versions_max: int = 12
    """A contribution older than this many versions is dropped as stale. At H = 8 these are 96 steps."""
    ring_versions: int = 8
    """Published updates kept per fragment for learners that missed some. Eight in int4 are as many bytes as
    the fragment itself, which is what a learner that missed more fetches."""
    norm_outlier_factor: float = 10.0
    """A contribution whose norm is above this times the running median of its fragment is quarantined."""
    quorum_timeout_ns: int = 120 * SECOND_NS
    """A round that has not reached its quorum after this is aborted and asked for again."""
    lease_ns: int = 15 * SECOND_NS
    """A learner that says nothing for this long is away: rounds no longer wait for it."""
    lost_after_ns: int = 60 * SECOND_NS
    """A learner that is away for this long is lost: its pending tokens are counted as lost until it comes back."""
    tokens_budget: int = 0
    """The run stops when this many tokens have been processed in total. 0: learners decide themselves."""
    feedback_up: bool = True
    """Error feedback of contributions: what encoding one has lost is added to the next. False: it is lost."""
    feedback_down: bool = True
    """The same for published updates, on the syncer."""
    correction: str = "none"
    """none, or heloco: contributions that disagree with the outer momentum are turned towards it, tensor by tensor."""
    outer_schedule: str = "constant"
    """The outer step over the run's tokens_budget: constant, or linear or cosine down to a tenth of it."""
    momentum_restart: int = 0
    """Every so many versions of a fragment its outer momentum starts from zero. 0: never."""
    partial: str = "scaled"
    """A merge in which contributions of learners that were asked are missing: scaled (so much smaller a step, by
    tokens; theirs count when they come) or full (a whole step for whoever is there)."""
    pacing: str = "fixed"
    """How many steps lie between two rounds of the same fragment: fixed (`sync_every`), warmup (every other step
    at first, growing to `sync_every`), or a registered policy."""
    outer: str = "nesterov"
    """The outer optimizer: what becomes of a merged gradient. nesterov, delayed, rownorm, or a registered one."""
    robust: str = "off"
    """What a merge does about a learner that lies: off (nothing), cosine (who points against the others is left out,
    and who is far longer than they are weighs less), or trimmed (that, and of tensors that are averaged each value goes
    without its highest and its lowest)."""
    adaptive: str = "off"
    """What is sent follows what is measured: off (the settings, to the bit), network (codecs and period follow the
    links), learning (rounds come more often while the run begins) or on (both)."""
    period_min: int = 4
    """With `adaptive`: the fewest steps between two rounds of a fragment."""
    period_max: int = 64
    """With `adaptive`: the most steps between two rounds of a fragment."""
    codec_ladder: str = ""
    """With `adaptive`: codecs that contributions may be asked for in, such as int8,int4,int2. codec_up, where a run
    begins, must be one of them. Empty: codec_up, and those of the usual ladder that have fewer bits."""

    def __post_init__(self) -> None:
        _at_least("sync_every", self.sync_every, 1, SYNC_EVERY_MAX)
        _at_least("fragments", self.fragments, 0, FRAGMENTS_MAX)
        _at_least("overlap", self.overlap, 0, SYNC_EVERY_MAX)
        _at_least("learners_expected", self.learners_expected, 1, LEARNERS_MAX)
        _at_least("carry_versions_max", self.carry_versions_max, 0, 1000)
        _at_least("ring_versions", self.ring_versions, 1, 1000)
        _at_least("quorum_timeout_ns", self.quorum_timeout_ns, 1, TIMEOUT_NS_MAX)
        _at_least("lease_ns", self.lease_ns, 1, 10**18)
        _at_least("lost_after_ns", self.lost_after_ns, 1, 10**18)
        _at_least("tokens_budget", self.tokens_budget, 0, 10**18)
        _at_least("momentum_restart", self.momentum_restart, 0, MOMENTUM_RESTART_MAX)
        _real("grace_cap_steps", self.grace_cap_steps, 0.0, 1000.0)
        _real("grace_gamma", self.grace_gamma, 0.0, 1.0)
        _real("share_max", self.share_max, 0.001, 1.0)
        _real("age_discount", self.age_discount, 0.0, 1.0)
        _real("outer_lr", self.outer_lr, 0.0, 100.0)
        _real("outer_momentum", self.outer_momentum, 0.0, 0.9999)
        _real("norm_outlier_factor", self.norm_outlier_factor, 1.0, 1e30)
        CODECS.check("codec_up", self.codec_up)
        CODECS.check("codec_down", self.codec_down)
        MERGES.check("merge", self.merge)
        OUTERS.check("outer", self.outer)
        one_of("weights", self.weights, WEIGHTS)
        one_of("correction", self.correction, CORRECTIONS)
        one_of("outer_schedule", self.outer_schedule, OUTER_SCHEDULES)
        one_of("partial", self.partial, PARTIALS)
        one_of("sizes", self.sizes, SIZES)
        one_of("robust", self.robust, ROBUSTS)
        if self.robust == "trimmed" and self.correction != "none":
            raise ConfigError(
                f"robust trimmed makes one of all contributions, and correction {self.correction} turns single ones; "
                "use robust cosine, or correction none"
            )
        PACING.check("pacing", self.pacing)
        _truth("feedback_up", self.feedback_up)
        _truth("feedback_down", self.feedback_down)
        if self.outer_schedule != "constant" and not self.tokens_budget:
            raise ConfigError(
                f"outer_schedule {self.outer_schedule} goes by the run's tokens, and this run has no budget of them; "
                "give tokens_budget (`atoll train` derives it, `atoll syncer` takes --tokens-budget), or use constant"
            )
        parse_adopt(self.adopt)
        self._check_adaptive()
        count, _ = parse_quorum(self.quorum)
        if count > max(self.learners_expected, 1):
            raise ConfigError(
                f"quorum {count} is above the {self.learners_expected} learners of this run, so no round could ever "
                f"close; use --quorum {self.learners_expected} or less, a share such as 50%, or all"
            )

    def _check_adaptive(self) -> None:
        one_of("adaptive", self.adaptive, ADAPTIVES)
        stated = self.codec_ladder.split(",") if self.codec_ladder else []
        for codec in stated:
            CODECS.check("codec_ladder", codec)
        if (stated and self.codec_up not in stated) or len(set(stated)) < len(stated) or len(stated) > LADDER_MAX:
            raise ConfigError(
                f"codec_ladder is {self.codec_ladder[:100]!r}: name up to {LADDER_MAX} different codecs, the run's "
                f"codec_up {self.codec_up} among them, with commas and no spaces, such as int8,int4,int2"
            )
        _at_least("period_min", self.period_min, 1, SYNC_EVERY_MAX)
        _at_least("period_max", self.period_max, 1, SYNC_EVERY_MAX)
        if self.period_min > self.period_max:
            raise ConfigError(
                f"period_min {self.period_min} is above period_max {self.period_max}, so no period is left; lower the "
                "one or raise the other"
            )
        if self.adaptive != "off" and not self.period_min <= self.sync_every <= self.period_max:
            raise ConfigError(
                f"adaptive {self.adaptive} keeps the period from period_min {self.period_min} to period_max "
                f"{self.period_max}, and sync_every {self.sync_every}, where it begins, is outside; change one of them"
            )

    @property
    def synchronous(self) -> bool:
        """True when learners wait at the step boundary for each merge."""
        return self.overlap == 0

    @property
    def rounds_in_flight_max(self) -> int:
        """ceil(tau * P / H), but never less than the fragments that fall due on one step."""
        due_per_step = -(-self.fragments // self.sync_every)
        return max(1, due_per_step, -(-self.overlap * self.fragments // self.sync_every))

    def to_dict(self) -> dict[str, Any]:
        """All settings, but those of LATER_SETTINGS only where they are not what older versions and this one do."""
        silent = {f.name: f.default for f in fields(self) if LATER_SETTINGS.get(f.name) == f.default}
        return {n: v for n, v in asdict(self).items() if n not in silent or v != silent[n]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SyncConfig:
        """Build from untrusted key-value data: unknown names and wrong types are errors."""
        known = {f.name: f for f in fields(cls)}
        for name, value in values.items():
            if name not in known:
                raise ConfigError(
                    f"unknown setting {name!r}; {meant(name, known)}known settings are {', '.join(sorted(known))}"
                )
            wanted = {"int": int, "float": (int, float), "str": str, "bool": bool}[str(known[name].type)]
            if isinstance(value, bool) != (wanted is bool) or not isinstance(value, wanted):  # type: ignore[arg-type]
                kind = "true or false" if wanted is bool else known[name].type
                raise ConfigError(f"setting {name} must be {kind}, not {value!r}")
        try:
            typed: dict[str, Any] = {n: float(v) if known[n].type == "float" else v for n, v in values.items()}
        except OverflowError:
            raise ConfigError(
                "a setting is a whole number of more than 300 digits; use a number in its range"
            ) from None
        return cls(**typed)


@lru_cache(maxsize=64)
def parse_quorum(quorum: str) -> tuple[int, float]:
    """ "3" -> (3, 0.0); "50%" -> (0, 0.5); "all" -> (0, 1.0)."""
    text = str(quorum).strip()
    if text == "all":
        return 0, 1.0
    try:
        if text.endswith("%"):
            share = float(text[:-1]) / 100.0
            if 0.0 < share <= 1.0:
                return 0, share
        elif int(text) >= 1:
            return int(text), 0.0
    except ValueError:
        pass
    raise ConfigError(f"quorum must be a number from 1, a share such as 50%, or all; not {quorum!r}")


@lru_cache(maxsize=64)
def parse_adopt(adopt: str) -> tuple[str, float]:
    """ "rebase" -> ("rebase", 0); "overwrite" -> ("overwrite", 0); "mix:0.5" -> ("mix", 0.5)."""
    if adopt in ("rebase", "overwrite"):
        return adopt, 0.0
    if adopt.startswith("mix:"):
        try:
            alpha = float(adopt[4:])
        except ValueError:
            alpha = -1.0
        if 0.0 < alpha <= 1.0:
            return "mix", alpha
    raise ConfigError(f"adopt must be rebase, overwrite or mix:ALPHA with 0 < ALPHA <= 1; not {adopt!r}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`, else raise naming them."""
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; not {value!r}{_hint(value, choices)}")
    return value


def meant(word: str, known: Iterable[str]) -> str:
    """The beginning of an answer to a misspelt word; empty if it is like none of those that are known."""
    near = difflib.get_close_matches(str(word)[:60], list(known), n=1)
    return f"did you mean {near[0]}? " if near else ""


def _hint(word: str, known: Iterable[str]) -> str:
    found = meant(word, known).strip()
    return f" ({found})" if found else ""


def _truth(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false; not {value!r}")


def _at_least(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}; not {value!r}")


def _real(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or not low <= value <= high:  # NaN is in no range
        raise ConfigError(f"{name} must be a number from {low:g} to {high:g}; not {value!r}")
