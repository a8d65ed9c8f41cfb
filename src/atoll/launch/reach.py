"""How a command finds the syncer of a run: by HOST:PORT, or by the run folder of one on this machine."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.errors import LaunchError
from atoll.launch.folder import MARKERS, SMALL_FILE_BYTES_MAX, RunFolder
from atoll.wire import ClientOptions, join_address, split_address

EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a syncer that listens on all interfaces is reached from its own machine."""


@dataclass(frozen=True, slots=True)
class KnownAddress:
    """Where the syncer of a run is said to be."""

    options: ClientOptions
    run: str = ""
    """The run that the folder holds; empty if only an address was given."""


def run_folder_of(target: str) -> RunFolder | None:
    """The run folder that `target` names, None if it is an address. Raises LaunchError if it is neither."""
    path = Path(target).expanduser()
    if path.is_dir():
        folder = RunFolder(path)
        if not any((path / marker).exists() for marker in MARKERS):
            raise LaunchError(
                f"{target} holds no run; give the folder that the run named, such as runs/..., or HOST:PORT"
            )
        return folder
    if "/" in target or ":" not in target:
        raise LaunchError(
            f"there is no run folder {target}; give the folder that the run named, such as runs/..., or the syncer's "
            f"HOST:PORT"
        )
    return None


def reach(target: str, *, token: str = "", tls_ca: str = "", tls_name: str = "") -> KnownAddress:
    """`target` is HOST:PORT or a run folder. What the folder knows (token, certificate, name) need not be given. Raises
    LaunchError for a folder without a syncer."""
    folder = run_folder_of(target)
    if folder is None:
        return KnownAddress(ClientOptions(address=target, token=token, tls_ca=tls_ca, tls_name=tls_name))
    told = _told(folder)
    try:
        host, port = split_address(str(told["address"]))
        if host in EVERYWHERE:
            elsewhere = told.get("host", "") not in ("", socket.gethostname())
            host = str(told["host"]) if elsewhere else EVERYWHERE[host]
        names = [str(name) for name in told.get("names", ())]
        options = ClientOptions(
            address=join_address(host, port),
            token=token or folder.read_token(),
            tls_ca=tls_ca or str(told.get("certificate", "")),
            tls_name=tls_name or (names[0].replace("*", "any") if names and host not in names else ""),
        )
    except (OSError, KeyError, TypeError) as error:
        raise LaunchError(f"{folder.syncer_file} cannot be used ({error!r}); give HOST:PORT instead") from error
    return KnownAddress(options, str(told.get("run", "")))


def _told(folder: RunFolder) -> dict[str, Any]:
    """What the last syncer of this folder said of itself."""
    try:
        if folder.syncer_file.stat().st_size > SMALL_FILE_BYTES_MAX:
            raise ValueError("it is too large")
        told = json.loads(folder.syncer_file.read_text())
        if not isinstance(told, dict):
            raise ValueError("not an object")
        return told
    except FileNotFoundError:
        raise LaunchError(f"no syncer has started in {folder.path} yet; its logs may say why") from None
    except (OSError, ValueError, RecursionError) as error:
        raise LaunchError(f"{folder.syncer_file} cannot be read ({error}); give HOST:PORT instead") from error
