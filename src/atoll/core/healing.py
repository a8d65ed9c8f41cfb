"""A syncer came back with an older state than it had published: the learners bring the newer versions back.

Every learner says in its Hello which version of each fragment it holds and that version's checksum. Once those that
were in the run are back (or some time has passed since the first), the newest version of each fragment is asked for
from one learner that holds it, whole. A version is believed

    by its checksum       if it is the one on the tape
    by a second holder    if two learners or more hold it with the same checksum; of several the one with most holders
    by its place          if one learner alone claims it, and no two others agree on another: at most
                          CLOSE_VERSIONS_MAX beyond what the disk, the tape or any other learner has
                          (LONE_VERSIONS_MAX beside a single other). Its parameters must then be near those of the
                          disk, too (`policy.heal_limit`), so that a claim of one's own changes little
    by itself             if nobody else is there who holds anything of the run, up to LOST_VERSIONS_MAX

So where two agree, one that is ahead of them is not believed. If it was honest, what it had beyond them is lost: a
version or two, and only after the disk and the tape have lost them, since both have every version before it is
published. If it was not, the run would have been its own.

Whoever was asked and did not deliver is believed alone no longer: it costs the run a pause once, and not for ever.

Only the parameters come back this way. The outer momentum is what the disk has, a few versions older.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from atoll.core.config import SECOND_NS

HEAL_WAIT_NS = 10 * SECOND_NS
"""After the first learner is back, how long the others may take: twice the longest pause between two attempts to
reconnect. Learners train on meanwhile."""
CLOSE_VERSIONS_MAX = 2
"""How far ahead of OTHERS_MIN others or more, no two of which agree, one learner's word counts: learners that keep up
are a version or two apart. What is lost if it was true after all is that much."""
LONE_VERSIONS_MAX = 100
"""The same beside one other: a disk that could not be written for a minute lacks about so many at a tenth of a second a
step, and of two learners either may be behind."""
LOST_VERSIONS_MAX = 1_000_000
"""How many versions a disk may lack: a commit a second for twelve days."""
VERSION_MAX = 10**12
"""A version that anybody can hold."""
TRIES_MAX = 3
"""How often one learner may go away while it is asked for something: a link may break, but not always then."""
HEAL_PUSH_NS = 600 * SECOND_NS
"""How long one learner may take to push what it was asked for; then another is asked. As for a seed."""
LONE_PUSH_NS = 60 * SECOND_NS
"""The same for what one learner alone claims, where OTHERS_MIN others hold an older version to go on from. No round
runs meanwhile, so that a claim that nobody keeps costs the run a minute. 150 MB come within that at 20 Mbit/s. And for
the first who is asked for what others hold as well; each that follows has twice as long, the last HEAL_PUSH_NS."""
OTHERS_MIN = 2
"""Learners whose word outweighs that of one."""


@dataclass(frozen=True, slots=True)
class VersionClaim:
    """Somebody holds this version."""

    version: int
    checksum: int


class Healing:
    """What is missing, who claims to hold it, and who was asked."""

    def __init__(
        self, versions: Sequence[int], known: Mapping[int, VersionClaim], expected: set[str], *, strangers: bool = False
    ) -> None:
        self.versions = list(versions)
        self._strangers = strangers
        """Nobody knows who was in the run: the others always have the whole time."""
        self._known = dict(known)
        self._expected = set(expected)
        self._claims: dict[int, dict[VersionClaim, set[str]]] = {}
        self._asked: dict[int, tuple[str, VersionClaim, int]] = {}
        self._taken: dict[int, str] = {}
        """Fragments whose parameters have come and are being put in place, and who gave them. Nothing is over before
        that is done, even if their giver goes away meanwhile."""
        self._held: dict[int, dict[str, VersionClaim]] = {}
        """By fragment, what each learner says it holds."""
        self._failed: dict[str, int] = {}
        """How often each learner was asked and did not deliver."""
        self._late: dict[int, dict[VersionClaim, set[str]]] = {}
        """By fragment and version, those who were asked and have taken too long. They vouch for it all the same."""
        self._first_ns = -1
        self._looked_ns = -1
        self.healed: dict[int, int] = {}
        """Fragments that a learner has brought back, and in which version."""
        self.warnings: list[str] = []

    def hear(self, learner: str, bases: Sequence[int], checksums: Sequence[int], now_ns: int) -> None:
        """A learner is back."""
        self._first_ns = now_ns if self._first_ns < 0 else self._first_ns
        self._expected.discard(learner)
        self.forget(learner)
        for fragment, (version, checksum) in enumerate(zip(bases, checksums, strict=False)):
            if fragment >= len(self.versions) or version > VERSION_MAX:
                continue
            self._held.setdefault(fragment, {})[learner] = VersionClaim(version, checksum)
            if version <= self.versions[fragment]:
                continue
            known = self._known.get(fragment)
            if known is not None and known.version == version and known.checksum != checksum:
                self.warnings.append(
                    f"learner {learner!r} holds version {version} of fragment {fragment} with another checksum than "
                    "the one on the tape; it is not used, and that learner takes the run's state"
                )
                continue
            self._claims.setdefault(fragment, {}).setdefault(VersionClaim(version, checksum), set()).add(learner)

    def forget(self, learner: str) -> None:
        """Its session is over: whatever it was asked for must come from another."""
        for holders in self._claims.values():
            for names in holders.values():
                names.discard(learner)
        for held in self._held.values():
            held.pop(learner, None)
        if any(asked[0] == learner for asked in self._asked.values()):
            self._failed[learner] = self._failed.get(learner, 0) + 1
        self._asked = {p: asked for p, asked in self._asked.items() if asked[0] != learner}

    def best(self, fragment: int) -> tuple[VersionClaim, str] | None:
        """The newest version that is still claimed, and the learner to ask for it."""
        claims = {c: names for c, names in self._claims.get(fragment, {}).items() if names}
        claims = {c: names for c, names in claims.items() if c.version > self.versions[fragment]}
        claims = {
            c: names for c, names in claims.items() if not self.is_lone(fragment, c) or self._is_near(fragment, c)
        }
        if not claims:
            return None
        newest = max(claim.version for claim in claims)
        rivals = sorted((c for c in claims if c.version == newest), key=lambda c: (-len(claims[c]), c.checksum))
        if len(rivals) > 1:
            self.warnings.append(
                f"learners hold version {newest} of fragment {fragment} with {len(rivals)} different checksums; "
                f"the one with the most holders ({len(claims[rivals[0]])}) is used"
            )
        return rivals[0], min(claims[rivals[0]])

    def is_lone(self, fragment: int, claim: VersionClaim) -> bool:
        """True if nobody but one learner vouches for this version."""
        vouch = self._claims.get(fragment, {}).get(claim, set()) | self._slow(fragment, claim)
        return claim != self._known.get(fragment) and len(vouch) < 2

    def _slow(self, fragment: int, claim: VersionClaim) -> set[str]:
        return self._late.get(fragment, {}).get(claim, set())

    def _is_near(self, fragment: int, claim: VersionClaim) -> bool:
        """Whether what one learner alone claims may be true."""
        name = next(iter(self._claims[fragment][claim]))
        if self._failed.get(name, 0) >= TRIES_MAX:
            return False
        others = [held for other, held in self._held.get(fragment, {}).items() if other != name and held.version >= 0]
        if max(Counter(others).values(), default=0) >= OTHERS_MIN:
            return False
        known = self._known.get(fragment)
        durable = max(self.versions[fragment], known.version if known is not None else -1)
        if others:
            most = CLOSE_VERSIONS_MAX if len(others) >= OTHERS_MIN else LONE_VERSIONS_MAX
            return claim.version <= max(durable, *(held.version for held in others)) + most
        return durable < 0 or claim.version <= durable + LOST_VERSIONS_MAX

    def ask(self, now_ns: int) -> dict[str, list[tuple[int, VersionClaim]]]:
        """Who is to be asked for what now; empty before the wait is over and when everything was asked for."""
        self._looked_ns = now_ns
        if not self._waited(now_ns):
            return {}
        late = [p for p in self._asked if now_ns >= self._late_ns(p)]
        for fragment in late:
            learner, claim, _ = self._asked.pop(fragment)
            self._claims[fragment][claim].discard(learner)
            self._failed[learner] = TRIES_MAX
            self._late.setdefault(fragment, {}).setdefault(claim, set()).add(learner)
        wanted: dict[str, list[tuple[int, VersionClaim]]] = {}
        for fragment in range(len(self.versions)):
            found = None if fragment in self._asked or fragment in self._taken else self.best(fragment)
            if found is not None:
                claim, learner = found
                self._asked[fragment] = (learner, claim, now_ns)
                wanted.setdefault(learner, []).append((fragment, claim))
        return wanted

    def _late_ns(self, fragment: int) -> int:
        """When whoever was asked for this fragment has taken too long."""
        learner, claim, since_ns = self._asked[fragment]
        others = sum(other != learner for other in self._held.get(fragment, {}))
        if self.is_lone(fragment, claim) and others >= OTHERS_MIN:
            return since_ns + LONE_PUSH_NS
        if len(self._claims[fragment][claim]) > 1:
            return since_ns + min(HEAL_PUSH_NS, LONE_PUSH_NS << min(10, len(self._slow(fragment, claim))))
        return since_ns + HEAL_PUSH_NS

    def asked(self, fragment: int, learner: str) -> VersionClaim | None:
        """What this learner was asked for."""
        entry = self._asked.get(fragment)
        return entry[1] if entry is not None and entry[0] == learner else None

    def reject(self, fragment: int, learner: str) -> None:
        """What this learner gave cannot be used: ask another, and do not ask this one again."""
        claim = self.asked(fragment, learner)
        if claim is not None:
            del self._asked[fragment]
            self._claims[fragment][claim].discard(learner)
            self._failed[learner] = TRIES_MAX

    def take(self, fragment: int, learner: str) -> None:
        """What this learner gave is good; `done` follows."""
        del self._asked[fragment]
        self._taken[fragment] = learner

    def giver(self, fragment: int) -> str:
        """Who gave this fragment."""
        return self._taken.get(fragment, "")

    def done(self, fragment: int, version: int) -> None:
        """This fragment is in place in this version."""
        self.versions[fragment] = max(self.versions[fragment], version)
        self._asked.pop(fragment, None)
        self._taken.pop(fragment, None)
        self.healed[fragment] = version

    def over(self, now_ns: int) -> bool:
        """True when nothing newer is to be had. A fragment that nobody has at all keeps it open."""
        if not self._waited(now_ns) or self._asked or self._taken or min(self.versions) < 0:
            return False
        return all(self.best(fragment) is None for fragment in range(len(self.versions)))

    @property
    def in_vain(self) -> bool:
        """True if whoever claimed anything has failed to deliver it, and nothing of the run is here."""
        claims = any(names for holders in self._claims.values() for names in holders.values())
        failed = any(count >= TRIES_MAX for count in self._failed.values())
        return failed and not claims and not self._asked and not self._taken and max(self.versions) < 0

    def next_wake_ns(self) -> int | None:
        wakes = [self._late_ns(fragment) for fragment in self._asked]
        waits = self._expected or self._strangers
        if self._first_ns >= 0 and waits and self._looked_ns < self._first_ns + HEAL_WAIT_NS:
            wakes.append(self._first_ns + HEAL_WAIT_NS)
        return min(wakes) if wakes else None

    def _waited(self, now_ns: int) -> bool:
        everybody = not self._expected and not self._strangers
        return self._first_ns >= 0 and (everybody or now_ns >= self._first_ns + HEAL_WAIT_NS)

    def nowhere(self, now_ns: int) -> list[int]:
        """Fragments that neither this syncer nor anybody who is connected has."""
        if not self._waited(now_ns):
            return []
        missing = [p for p, version in enumerate(self.versions) if version < 0 and p not in self._taken]
        return [p for p in missing if not any(self._claims.get(p, {}).values())]
