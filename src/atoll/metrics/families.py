"""Metric families as plain data: a name, a help text, and a number for each set of labels.

Counting happens wherever events are emitted, so it is a dictionary's work; text is made when somebody asks. Labels that
a run's members choose are bounded: a Prometheus pays for each value for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LEARNERS_MAX = 200
"""Learners with a label of their own; what the others do is added up under OTHER."""
OTHER = "other"
LABEL_VALUES_MAX = 64
"""Of any other label (causes, outcomes): ours are a dozen."""


class Families:
    """Counters only grow, gauges are set. A name ends with its unit; the library adds a counter's `_total`."""

    def __init__(self) -> None:
        self._kinds: dict[str, tuple[str, str, tuple[str, ...]]] = {}
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._seen: dict[str, set[str]] = {}

    def counter(self, name: str, help_text: str, *labels: str) -> None:
        self._add(name, "counter", help_text, labels)

    def gauge(self, name: str, help_text: str, *labels: str) -> None:
        self._add(name, "gauge", help_text, labels)

    def _add(self, name: str, kind: str, help_text: str, labels: tuple[str, ...]) -> None:
        self._kinds[name] = (kind, help_text, labels)
        self._values[name] = {} if labels else {(): 0.0}

    def add(self, name: str, amount: float, *values: str) -> None:
        key = self._key(name, values)
        self._values[name][key] = self._values[name].get(key, 0.0) + amount

    def set(self, name: str, value: float, *values: str) -> None:
        key = self._key(name, values)
        if OTHER not in key:  # the last of many says nothing of them all
            self._values[name][key] = value

    def clear(self, name: str) -> None:
        self._values[name].clear()

    def get(self, name: str, *values: str) -> float:
        return self._values[name].get(values, 0.0)

    def _key(self, name: str, values: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self._bounded(label, value) for label, value in zip(self._kinds[name][2], values, strict=True))

    def _bounded(self, label: str, value: str) -> str:
        seen = self._seen.setdefault(label, set())
        if value not in seen:
            if len(seen) >= (LEARNERS_MAX if label == "learner" else LABEL_VALUES_MAX):
                return OTHER
            seen.add(value)
        return value

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks of a collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, (kind, help_text, labels) in self._kinds.items():
            make: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(name, help_text, labels=list(labels))
            for key, value in list(self._values[name].items()):
                family.add_metric(list(key), value)
            yield family
