from __future__ import annotations

import pytest
from compat_old import OldCode


@pytest.fixture(scope="session", params=[1, 2], ids=["protocol 1", "protocol 2"])
def old_code(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OldCode:
    """The code of an older protocol, unpacked once; its kernels are compiled by the first process that needs them."""
    return OldCode(tmp_path_factory.mktemp(f"protocol-{request.param}"), request.param)
