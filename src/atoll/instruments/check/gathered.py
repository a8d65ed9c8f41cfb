from __future__ import annotations

from collections import Counter

from atoll.instruments.check.checker import Checker
from atoll.instruments.check.facts import Committed, Identity, RelayMerged


class GatheredOnce(Checker):
    """I19. What a version has of contributions that waited at relays came from a relay for that very version, each of
    them once: none is counted as merged that is in no payload, and none is in two of them."""

    invariant = "I19"
    statement = "what was merged at a relay is what the version says, once"

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[int, tuple[int, dict[str, tuple[Identity, ...]]]] = {}
        """By fragment: the newest version that was asked for, and what each relay gave for it last."""

    def on_relaymerged(self, fact: RelayMerged) -> None:
        version, sent = self._sent.get(fact.fragment, (fact.version, {}))
        if version != fact.version:
            sent = {}
        self._sent[fact.fragment] = (fact.version, {**sent, fact.relay: fact.contributions})

    def on_committed(self, fact: Committed) -> None:
        version, sent = self._sent.get(fact.fragment, (-1, {}))
        there = Counter(one for each in sent.values() for one in each) if version == fact.version else Counter()
        wrong = [one for one in fact.at_relays if there[one] != 1]
        if wrong:
            self.complain(
                f"fragment {fact.fragment}: version {fact.version} counts contribution {wrong[0]} from a relay, which "
                f"gave it {there[wrong[0]]} times"
            )
