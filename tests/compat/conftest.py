from __future__ import annotations

import pytest
from compat_old import OldCode


@pytest.fixture(scope="session")
def old_code(tmp_path_factory: pytest.TempPathFactory) -> OldCode:
    """The code of protocol 1, unpacked once; its kernels are compiled by the first process that needs them."""
    return OldCode(tmp_path_factory.mktemp("protocol-1"))
