"""What `import atoll` offers. A name that is added or removed must be added or removed here, on purpose."""

from __future__ import annotations

import subprocess
import sys

import pytest

import atoll

NAMES = {
    "AtollError",
    "ConfigError",
    "CorpusError",
    "FencedError",
    "LaunchError",
    "LayoutError",
    "Learner",
    "LocalProtocolError",
    "PayloadError",
    "ProtocolError",
    "RefusedError",
    "RemoteProtocolError",
    "StoreError",
    "SyncConfig",
    "UnreachableError",
    "__version__",
    "data",
    "load_model",
    "register_codec",
    "register_merge",
    "register_outer",
    "register_pacing",
}


def test_the_exported_names() -> None:
    assert set(atoll.__all__) == NAMES
    assert all(getattr(atoll, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'Lerner'"):
        _ = atoll.Lerner  # type: ignore[attr-defined]


def test_errors_form_one_tree() -> None:
    errors = [getattr(atoll, name) for name in NAMES if name.endswith("Error")]
    assert all(issubclass(error, atoll.AtollError) for error in errors)
    assert issubclass(atoll.ConfigError, ValueError) and issubclass(atoll.FencedError, atoll.RefusedError)


def test_importing_atoll_is_light_and_the_syncer_needs_no_torch() -> None:
    script = (
        "import sys, atoll; heavy = {'torch', 'numba', 'grpc'} & set(sys.modules); assert not heavy, heavy; "
        "import atoll.syncer.serve; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
