"""What this machine lacks for the comparison, told in a minute, before a long run: each system makes a short run.

    python3 benchmarks/peers/preflight.py [--systems atoll,ddp] [--folder bakeoff] [--seconds-max 58]

One line for each thing and each system. Names of those that work go to FOLDER/systems.txt, with commas between; a plan
goes on with them. It ends with status 1 if something is missing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from net import lack_of_delays, lack_of_links
from result import read_lines
from systems import DEVICE, HERE, SYSTEMS

PACKAGES = "torch numpy scipy numba grpcio protobuf matplotlib"
"""What a machine has of its own; all else comes along (`wheels`)."""
IMPORTS = {
    "torchft": "import torchft.local_sgd, torchft.coordination",
    "hivemind": "import hivemind",
    "flower": "import flwr.server.strategy, flwr.client",
    "nvflare": "import nvflare.client, nvflare.app_opt.pt.recipes.fedavg, nvflare.fuel.flare_api.flare_api",
    "": "import atoll, grpc, cryptography, typer; from atoll import kernels; kernels.warm_up()",
}
"""By environment. Kernels are compiled here, once, as an installation does it."""
IMPORT_SHARE_MAX = 0.6
"""Of the time that there is."""
WINDOW_S = 6.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(DEVICE))
    parser.add_argument("--folder", type=Path, default=Path("bakeoff"))
    parser.add_argument("--seconds-max", type=float, default=58.0)
    parser.add_argument("--imports", action="store_true", help="no short runs: only what can be imported")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds_max
    names = options.systems.split(",")
    options.folder.mkdir(parents=True, exist_ok=True)
    tell_machine()
    with ThreadPoolExecutor() as pool:
        import_s_max = [IMPORT_SHARE_MAX * options.seconds_max] * len(IMPORTS)
        found = dict(zip(IMPORTS, pool.map(lack_of_imports, IMPORTS, import_s_max), strict=True))
    lacks = {name: found[SYSTEMS[name].venv] for name in names}
    trying = [name for name in names if not lacks[name]]
    if trying and not options.imports:
        lacks |= lacks_of_runs(trying, options.folder / "preflight", deadline)
    for name in names:
        print(f"{name}: {lacks[name] or 'works'}", flush=True)
    working = [name for name in names if not lacks[name]]
    (options.folder / "systems.txt").write_text(",".join(working) + "\n")
    if missing := [name for name in names if lacks[name]]:
        sys.exit(f"left out, for the reasons above: {', '.join(missing)}")


def tell_machine() -> None:
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores, kernel {os.uname().release}")
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES.split()))
    links = lack_of_links()
    print(f"ip: {shutil.which('ip')}, tc: {shutil.which('tc')}, /dev/net/tun: {Path('/dev/net/tun').exists()}")
    print(f"limited links: {links or 'yes'}; delays: {links or lack_of_delays() or 'yes'}", flush=True)


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "MISSING"


def lack_of_imports(venv: str, seconds_max: float) -> str:
    system = next(system for system in SYSTEMS.values() if system.venv == venv)
    environment = {**os.environ, "PYTHONPATH": system.python_path}
    try:
        done = subprocess.run(
            [system.python, "-c", IMPORTS[venv]], env=environment, capture_output=True, text=True, timeout=seconds_max
        )
    except FileNotFoundError:
        return "it has no environment here; run benchmarks/peers/venvs, or wheels unpack where there is no index"
    except subprocess.TimeoutExpired:
        return f"`{IMPORTS[venv]}` took more than {seconds_max:.0f} s"
    said = done.stderr.strip().splitlines()
    return f"`{IMPORTS[venv]}` says: {said[-1] if said else 'nothing'}" if done.returncode else ""


def lacks_of_runs(names: list[str], folder: Path, deadline: float) -> dict[str, str]:
    """Each makes steps and exchanges something, all at once, on hosts as they will be in the long run."""
    shutil.rmtree(folder, ignore_errors=True)
    runs = {name: start_run(name, folder / name) for name in names}
    for run in runs.values():
        try:
            run.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            run.send_signal(signal.SIGTERM)  # it ends what it started
            run.wait()
    rows = {name: read_lines(folder / name / "results.jsonl") for name in names}
    late = "its short run did not end in time; give --seconds-max more, or look into preflight/NAME/log.txt"
    return {name: lack_of_run(rows[name][0]) if rows[name] else late for name in names}


def start_run(name: str, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE / "bakeoff.py"), "--systems", name, "--scenarios", "clean"]
    command += ["--seconds", str(WINDOW_S), "--step-ms", "80", "--batch", "4", "--folder", str(folder)]
    with (folder / "log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def lack_of_run(row: dict[str, object]) -> str:
    return "" if row["steps_per_s"] and row["exchanges"] else str(row["why"] or "it made no step")


if __name__ == "__main__":
    main()
