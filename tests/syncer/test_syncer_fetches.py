"""What whoever fetches parameters is told."""

from __future__ import annotations

import pytest

from atoll.core import NO_VERSION, FetchKind, FetchRequest
from atoll.errors import RefusedError
from atoll.syncer.fragment_work import theta_header


def test_a_fragment_that_waits_for_its_learners_is_served_to_nobody() -> None:
    """A shard on an empty disk served zeros without a version; a relay kept them, and gave every newcomer of its site
    those for ever (draw 7, seed 2784)."""
    request = FetchRequest(FetchKind.THETA, "l0", 1, 0, NO_VERSION)
    with pytest.raises(RefusedError, match="bringing it back"):
        theta_header((NO_VERSION, 0, memoryview(bytes(4))), request)
    assert theta_header((0, 0, memoryview(bytes(4))), request)[0].version == 0
