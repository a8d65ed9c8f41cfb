"""Coordinator, shards and relays that fail: what is simulated is what is expected on paper."""

from __future__ import annotations

import pytest

from atoll.errors import ConfigError
from atoll.instruments.fleet import Aim, Cell, Parts, simulate_cell

HARSH_S = 600.0
"""Between two failures of one host, so that an hour or two shows many."""
SECONDS = 12_000.0


def cell(method: str, parts: Parts | None) -> Cell:
    """Two learners whose chips never fail: all that is lost is lost by the parts."""
    return simulate_cell(512, 2, method, mtbi_s=1e9, aim=Aim(seconds=SECONDS), parts=parts)


def test_learners_train_on_whatever_fails() -> None:
    parts = Parts(shards=3, relays=2, mtbf_s=HARSH_S, restart_s=60.0)
    found = cell("decoupled", parts)
    assert found.parts_failed > 50 and found.failures == 0
    assert found.goodput > 99.9 and found.uptime > 99.9
    assert found.exchange == pytest.approx(found.exchange_estimate, abs=4.0) and found.exchange < 90.0
    assert cell("decoupled", None).exchange == 100.0


def test_a_synchronous_run_waits_for_them_and_a_standby_helps() -> None:
    alone = cell("diloco", Parts(mtbf_s=HARSH_S, restart_s=60.0))
    helped = cell("diloco", Parts(mtbf_s=HARSH_S, restart_s=60.0, standby=True, takeover_s=15.0))
    assert alone.goodput == pytest.approx(alone.estimate, abs=4.0)
    assert helped.goodput == pytest.approx(helped.estimate, abs=4.0)
    assert helped.goodput > alone.goodput + 2.0 and helped.exchange > alone.exchange


def test_on_paper() -> None:
    day = Parts(mtbf_s=86400.0, restart_s=864.0)
    assert day.expected_exchange() == pytest.approx(100.0 / 1.01)
    assert Parts(2, 0, mtbf_s=86400.0, restart_s=864.0).expected_exchange() == pytest.approx(100.0 / 1.01**2)
    # More shards fail more often, and each stops less.
    assert Parts(8, 0, mtbf_s=86400.0).expected_exchange() == Parts(2, 0, mtbf_s=86400.0).expected_exchange()
    # A return within the period of 48 s is waited for in part: 24 s of 24 in half of the cases, 6 s on average.
    assert Parts(mtbf_s=1000.0, restart_s=24.0).synchronous_share(48.0) == pytest.approx(1000.0 / 1006.0)
    assert Parts(mtbf_s=1000.0, restart_s=100.0).synchronous_share(48.0) == pytest.approx(1000.0 / 1076.0)
    assert Parts(restart_s=3.0, reroute_s=5.0).relay_away_s == 3.0


def test_parts_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="give fewer relays"):
        simulate_cell(512, 2, "decoupled", parts=Parts(relays=3))
    for wrong in ({"shards": 65}, {"relays": -1}, {"mtbf_s": 0.0}, {"restart_s": -1.0}, {"takeover_s": float("nan")}):
        with pytest.raises(ConfigError):
            Parts(**wrong)  # type: ignore[arg-type]
