"""May this learner join, may this push come in: the checks that run before any state is touched."""

from __future__ import annotations

from atoll.core.codec_ladder import ladder_of
from atoll.core.config import CODECS, SyncConfig
from atoll.core.identity import same_secret
from atoll.core.layout import Layout
from atoll.core.membership import Member, MemberState
from atoll.core.messages import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    STEP_MAX,
    TOKENS_MAX,
    Hello,
    PushHeader,
    PushReply,
    Refusal,
    Refused,
    TensorSpec,
)
from atoll.core.policy import age_limit
from atoll.core.rounds import FragmentTrack

SETTINGS_PROTOCOL = 2
"""Learners of older protocols are not told of settings that came later."""
CODECS_EARLIER = frozenset({"fp32", "bf16", "int8", "int4"})
"""What they know of codecs."""
CODEC_FALLBACK = "int4"
"""What a learner is given that does not know the run's codec of contributions. Everybody knows it."""


def check_sender(member: Member | None, learner: str, generation: int, secret: str) -> PushReply | None:
    """None if this push or fetch comes from the process in whose name it comes. The one place that looks at secrets."""
    if member is None:
        return _refuse(Refusal.UNKNOWN_LEARNER, f"learner {learner!r}: not a member of this run; say hello first")
    if generation != member.generation:
        return _refuse(
            Refusal.STALE_GENERATION,
            f"learner {learner!r}: generation {generation} was replaced by {member.generation}; restart that process",
        )
    if member.revoked:
        return _refuse(Refusal.KEY_REVOKED, member.revoked)
    if member.secret and not same_secret(secret, member.secret):
        return _refuse(
            Refusal.SECRET,
            f"learner {learner!r}: without the secret of its session; push and fetch with the one in the last Welcome",
        )
    return None


def check_hello(hello: Hello, run: str, layout: Layout | None, member: Member | None) -> Refused | None:
    """None if the learner may join, else the refusal."""
    if not PROTOCOL_OLDEST <= hello.protocol <= PROTOCOL_VERSION:
        return Refused(
            Refusal.PROTOCOL,
            f"learner {hello.learner!r} speaks protocol {hello.protocol}, this syncer speaks {PROTOCOL_OLDEST} to "
            f"{PROTOCOL_VERSION}; install the same version of atoll on both sides",
        )
    brief = bool(hello.fingerprint) and not hello.tensors
    if brief and (layout is None or hello.fingerprint != layout.tensors_fingerprint):
        return Refused(Refusal.TENSORS, f"say hello again with the tensors of learner {hello.learner!r}")
    if layout is not None and not brief and hello.tensors != layout.tensors:
        return Refused(
            Refusal.LAYOUT,
            f"the model of learner {hello.learner!r} differs from the run's: {describe_difference(layout, hello)}; "
            "start every learner of a run with the same model",
        )
    if member is not None and member.instance == hello.instance and member.state is MemberState.LEFT:
        return Refused(
            Refusal.CLOSED,
            f"learner {hello.learner!r} has left, and what it handed over is safe; a new process may join under its id",
        )
    # The same process with an older generation has not heard the Welcome that gave it a newer one.
    other = member is not None and member.instance != hello.instance
    if hello.run == run and member is not None and other and 0 < hello.generation < member.generation:
        return Refused(
            Refusal.FENCED,
            f"another process joined as learner {hello.learner!r} (generation {member.generation}, this one is "
            f"{hello.generation}); give each learner its own id",
        )
    return None


def check_settings(hello: Hello, config: SyncConfig) -> Refused | None:
    """A refusal if this run has a setting that the learner must follow and, being older, does not know."""
    if hello.protocol >= SETTINGS_PROTOCOL:
        return _check_codec_down(hello, config.codec_down)
    codecs = {"codec_up": config.codec_up, "codec_down": config.codec_down}
    unknown = [f"{name} {codec}" for name, codec in codecs.items() if codec not in CODECS_EARLIER]
    unknown += ["feedback_up off"] if not config.feedback_up else []
    # Who waits for merges must know when they are due; others are asked, whenever that is.
    unknown += [f"pacing {config.pacing}"] if config.synchronous and config.pacing != "fixed" else []
    unknown += [f"adaptive {config.adaptive}"] if config.synchronous and config.adaptive != "off" else []
    if not unknown:
        return None
    return Refused(
        Refusal.PROTOCOL,
        f"this run uses {' and '.join(unknown)}, which learner {hello.learner!r} does not know (it speaks protocol "
        f"{hello.protocol}); install the syncer's version of atoll where it runs",
    )


def knows_codec(hello: Hello, codec: str) -> bool:
    """True if the build that said this hello has this codec. One without a list knows no family of codecs."""
    family = CODECS.family(codec)
    return family in hello.codecs if hello.codecs else family not in CODECS.families


def codec_up_for(hello: Hello, config: SyncConfig) -> str:
    """The codec of this learner's contributions: the run's, or one that it knows."""
    return config.codec_up if knows_codec(hello, config.codec_up) else CODEC_FALLBACK


def _check_codec_down(hello: Hello, codec: str) -> Refused | None:
    """Published updates are the same bytes for everybody, so that whoever cannot decode them cannot take part."""
    if knows_codec(hello, codec):
        return None
    return Refused(
        Refusal.CODEC,
        f"this run publishes in codec_down {codec}, which the build of learner {hello.learner!r} does not know; "
        "install the syncer's version of atoll where it runs, or register that codec there",
    )


WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""Segments of torch's wrappers that older builds left in the names of tensors."""


def _bare(name: str) -> str:
    return ".".join(segment for segment in name.split(".") if segment not in WRAPPERS)


def describe_difference(layout: Layout, hello: Hello) -> str:
    """The first tensor in which two models differ, in words."""
    ours: dict[str, TensorSpec] = {t.name: t for t in layout.tensors}
    theirs: dict[str, TensorSpec] = {t.name: t for t in hello.tensors}
    for name, spec in ours.items():
        other = theirs.get(name)
        if other is None and _bare(name) in theirs:
            return (
                f"it has {_bare(name)!r} for {name!r}, as builds up to 0.4 named the tensors of a compiled or wrapped "
                "model; go on with that build, or export the run's model and begin a new run with atoll.load_model"
            )
        if other is None:
            return f"it lacks tensor {name!r}"
        if other != spec:
            return (
                f"tensor {name!r} is {other.dtype}{list(other.shape)} ({other.merge}) there and "
                f"{spec.dtype}{list(spec.shape)} ({spec.merge}) in the run"
            )
    extra = [name for name in theirs if name not in ours]
    return f"it has the extra tensor {extra[0]!r}" if extra else "its tensors are in another order"


def check_contribution(
    header: PushHeader, config: SyncConfig, member: Member | None, track: FragmentTrack, rounds_started: int
) -> PushReply | None:
    """None if this contribution may enter, else the refusal. Runs when a push opens and again when it is complete,
    because a newer generation may have come in between (reliability lesson 5)."""
    who = f"learner {header.learner!r}, fragment {header.fragment}, contribution {header.seq}"
    if member is None or member.state is MemberState.LEFT:
        return _refuse(Refusal.UNKNOWN_LEARNER, f"{who}: not a member of this run; say hello first")
    if header.generation != member.generation:
        return _refuse(
            Refusal.STALE_GENERATION,
            f"{who}: generation {header.generation} was replaced by {member.generation}; restart that process",
        )
    if header.seq <= member.seq_seen[header.fragment]:
        # First of all: whatever else has changed since, a contribution that was received is not new.
        return _refuse(Refusal.DUPLICATE, f"{who}: already received")
    if not member.bases:
        return _refuse(Refusal.NOT_READY, f"{who}: it has not adopted committed state yet; adopt, then say ready")
    if header.codec not in (member.codec_up, *(codec for codec, _ in ladder_of(config))):
        return _refuse(Refusal.CODEC, f"{who}: encoded as {header.codec!r}, the run uses {config.codec_up!r}")
    if not 0 <= header.round <= rounds_started:
        return _refuse(Refusal.UNKNOWN_ROUND, f"{who}: round {header.round} was never launched")
    if not 1 <= header.steps <= STEP_MAX or not 1 <= header.tokens <= TOKENS_MAX:
        return _refuse(
            Refusal.COUNTERS,
            f"{who}: {header.steps} steps and {header.tokens} tokens; a contribution needs at least one of each, and "
            "nobody has made so many",
        )
    if not 0 <= header.base_version <= track.version:
        return _refuse(Refusal.UNKNOWN_VERSION, f"{who}: base version {header.base_version}, newest is {track.version}")
    limit = age_limit(config, aside=bool(member.aside))
    if track.version - header.base_version > limit:
        return _refuse(
            Refusal.STALE_BASE,
            f"{who}: {track.version - header.base_version} versions old, at most {limit} are accepted; adopt the "
            "published version first",
        )
    return None


def _refuse(code: Refusal, detail: str) -> PushReply:
    return PushReply(accepted=False, code=code, detail=detail)
