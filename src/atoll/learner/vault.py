"""What a learner keeps, per fragment: published parameters, the base, residuals, contributions under way.

Theta is the published state, bit for bit the syncer's. The *base* is Theta as the parameters can hold it: for bf16
parameters it is Theta rounded to bf16, so that rounding is not mistaken for progress. For fp32 parameters the two are
one array. Arrays are never changed once they are in here, so background threads may read them without the shell's
lock; the dictionaries themselves are read and changed under it. Where they live is `arithmetic`'s business.

There is no framework in this file: the simulator uses it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.codec import Codec, fragment_codec, update_codec
from atoll.core import INLINE_BYTES_MAX, Layout, PushHeader, SyncConfig
from atoll.errors import PayloadError
from atoll.learner.arithmetic import U8, Arithmetic, HostArithmetic
from atoll.learner.parameters import Snapshot, into


@dataclass(frozen=True, slots=True)
class AdoptKey:
    """What a staged adopt was made for: it is only good from this version, with this rule and these contributions."""

    from_version: int
    rule: str
    already_merged: tuple[int, ...]


@dataclass(slots=True)
class HeldVersion:
    """One version of a fragment on this host."""

    version: int
    theta: Any
    base: Any
    checksum: int = 0
    """Of theta; 0 while it was not computed."""
    staged: tuple[AdoptKey, Any] | None = None
    """What the training thread will add or write, made and brought to the device ahead of the adopt."""


@dataclass(slots=True)
class HeldContribution:
    """A contribution on its way: what it was made from, and its bytes."""

    header: PushHeader
    snapshot: Snapshot
    origin: Any
    """What the snapshot is measured from: the base, plus the progress of older contributions still on their way."""
    feedback: bool
    payload: U8 | None = None
    residual: Any = None


class Vault:
    def __init__(self, layout: Layout, config: SyncConfig, arithmetic: Arithmetic[Any] | None = None) -> None:
        self.layout = layout
        self.config = config
        self.arithmetic = arithmetic or HostArithmetic()
        count = len(layout.fragments)
        self.current: list[HeldVersion | None] = [None] * count
        self.prepared: list[dict[int, HeldVersion]] = [{} for _ in range(count)]
        self.residuals: list[Any] = [None] * count
        self.sending: dict[tuple[int, int], HeldContribution] = {}
        self._merged: list[tuple[str, U8] | None] = [None] * count
        """The codec and the bytes of the last one that was merged, where the next one begins with it."""

    def small(self, fragment: int) -> bool:
        """True if contributions of this fragment are small enough for the control connection."""
        size_max = self.codec(self.config.codec_up, fragment).size_max(self.layout.fragments[fragment].size)
        return size_max <= INLINE_BYTES_MAX

    def codec(self, name: str, fragment: int) -> Codec:
        return fragment_codec(name, self.layout, fragment)

    # ------------------------------------------------------------ published versions

    def prepare_whole(self, fragment: int, version: int, payload: U8, checksum: int = 0) -> HeldVersion:
        expected = 4 * self.layout.fragments[fragment].size
        if payload.nbytes != expected:
            raise PayloadError(f"fragment {fragment} came with {payload.nbytes} bytes, expected {expected}")
        return self.published(fragment, version, self.arithmetic.loaded(payload), checksum)

    def newest(self, fragment: int) -> HeldVersion | None:
        """The newest version on this host, adopted or not."""
        prepared = self.prepared[fragment]
        return prepared[max(prepared)] if prepared else self.current[fragment]

    def prepare_update(self, fragment: int, before: HeldVersion, payload: U8, checksum: int) -> HeldVersion:
        """The version after `before`; PayloadError if the bits are not the syncer's."""
        version = before.version + 1
        codec = update_codec(self.config.codec_down, self.layout, fragment, payload.nbytes)
        theta = self.arithmetic.updated(before.theta, codec, payload)
        digest = self.arithmetic.checksum(theta, version, checksum)
        if checksum and digest != checksum:
            raise PayloadError(f"version {version} of fragment {fragment} differs from the syncer's")
        return self.published(fragment, version, theta, digest)

    def held(self, fragment: int, version: int) -> HeldVersion | None:
        """This version, if it is on this host."""
        current = self.current[fragment]
        return current if current is not None and current.version == version else self.prepared[fragment].get(version)

    def published(self, fragment: int, version: int, theta: Any, checksum: int) -> HeldVersion:
        """A version of these parameters, with its base."""
        return HeldVersion(version, theta, self.arithmetic.kept(fragment, theta), checksum)

    def adopt_values(
        self,
        key: AdoptKey,
        old: HeldVersion | None,
        new: HeldVersion,
        sent: list[HeldContribution],
        out: Any = None,
    ) -> Any:
        """What an adopt writes (Theta_new) or, under rebase, adds: base_new - base_old - progress of what is in it.
        They are in `out`, if it is given."""
        if key.rule != "rebase":
            return into(new.theta, out)
        assert old is not None
        return self.arithmetic.rebased(new.base, old.base, [(one.snapshot.values(), one.origin) for one in sent], out)

    def adopted(self, fragment: int, version: int) -> None:
        """The training thread has brought the parameters to this version."""
        published = self.prepared[fragment].pop(version, None)
        if published is not None:
            published.staged = None
            self.current[fragment] = published
        self.prepared[fragment] = {v: p for v, p in self.prepared[fragment].items() if v > version}

    # ------------------------------------------------------------ contributions

    def start_sending(
        self, header: PushHeader, snapshot: Snapshot, already_merged: tuple[int, ...], feedback: bool
    ) -> HeldContribution:
        current = self.current[header.fragment]
        assert current is not None and current.version == header.base_version
        origin = current.base
        for seq in already_merged:
            sent = self.sending[header.fragment, seq]
            origin = self.arithmetic.moved(origin, sent.snapshot.values(), sent.origin)
        sending = HeldContribution(header, snapshot, origin, feedback)
        self.sending[header.fragment, header.seq] = sending
        return sending

    def encode(self, sending: HeldContribution) -> U8:
        """Encode delta (+ residual). Background threads only. A run without feedback never has a residual."""
        fragment, feedback = sending.header.fragment, self.config.feedback_up
        residual = self.residuals[fragment] if sending.feedback else None
        codec = self._begun(sending.header.codec, fragment)
        sending.payload, sending.residual = self.arithmetic.encoded(
            codec, sending.snapshot.values(), sending.origin, residual, feedback=feedback
        )
        return sending.payload

    def settle(self, fragment: int, seq: int, merged: bool) -> HeldContribution | None:
        """The fate is known. A residual is replaced only when the contribution it came from was merged."""
        sending = self.sending.pop((fragment, seq), None)
        if sending is not None and merged and sending.residual is not None:
            self.residuals[fragment] = sending.residual
        if sending is not None and merged and sending.payload is not None:
            name = sending.header.codec
            self._merged[fragment] = (name, sending.payload) if _may_begin(self.codec(name, fragment)) else None
        return sending

    def _begun(self, name: str, fragment: int) -> Codec:
        """The codec, with what it may begin with (`LowRank.warmed`)."""
        codec, before = self.codec(name, fragment), self._merged[fragment]
        if before is None or before[0] != name:
            return codec
        warmed: Codec = codec.warmed(before[1])  # type: ignore[attr-defined]
        return warmed


def _may_begin(codec: Codec) -> bool:
    return hasattr(codec, "warmed")
