"""What this machine lacks for the comparison, before a long run: packages, `ip` and `tc`, namespaces, TAP, the peers.

    PYTHONPATH=src python3 benchmarks/peers/preflight.py

Prints one line for each thing, and ends with status 1 if something is missing.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

from net import lack_of_delays, lack_of_links
from systems import SYSTEMS

NEEDED = "numpy ml_dtypes numba grpcio protobuf xxhash safetensors fsspec typer rich lazy_loader torch"
ALSO = "cryptography scipy matplotlib"
"""For Atoll's certificates, hivemind, and figures."""
IMPORTS = {
    "torchft": "torchft.local_sgd, torchft.coordination",
    "hivemind": "hivemind",
    "flower": "flwr.server.strategy, flwr.client",
    "atoll": "atoll, atoll.kernels.loops, grpc, cryptography",
    "ddp": "torch.distributed",
}


def main() -> None:
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, kernel {os.uname().release}")
    missing = [name for name in (*NEEDED.split(), *ALSO.split()) if not _version(name)]
    links = lack_of_links()
    delays = links or lack_of_delays()
    print(f"ip: {shutil.which('ip')}, tc: {shutil.which('tc')}, /dev/net/tun: {Path('/dev/net/tun').exists()}")
    print(f"limited links: {links or 'yes'}")
    print(f"delays: {delays or 'yes'}")
    broken = [name for name, modules in IMPORTS.items() if not _imports(name, modules)]
    for what, names in (("packages", missing), ("systems", broken)):
        print(f"missing {what}: {', '.join(names) or 'none'}")
    sys.exit(bool(broken))


def _version(name: str) -> str:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = ""
    print(f"{name} {version or 'MISSING'}")
    return version


def _imports(name: str, modules: str) -> bool:
    system = SYSTEMS[name]
    code = f"import time; t = time.monotonic(); import {modules}; print(round(time.monotonic() - t, 1))"
    environment = {**os.environ, "PYTHONPATH": system.python_path}
    try:
        done = subprocess.run([system.python, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    except FileNotFoundError:
        print(f"{name}: no environment; run benchmarks/peers/venvs, or wheels unpack")
        return False
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    print(f"{name}: {'imported in ' if done.returncode == 0 else ''}{said[-1] if said else 'no answer'} s")
    return done.returncode == 0


if __name__ == "__main__":
    main()
