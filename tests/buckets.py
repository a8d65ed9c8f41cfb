"""A real S3 server for tests: moto in a process of its own, on loopback."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

from ports import quiet_port

START_S_MAX = 60.0


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """Its endpoint. The log goes into `folder`."""
    port = quiet_port()
    url = f"http://127.0.0.1:{port}"
    with (folder / "moto.log").open("wb") as log:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            deadline_s = time.monotonic() + START_S_MAX
            while True:
                try:
                    urllib.request.urlopen(url, timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < deadline_s, "moto did not start"
                    time.sleep(0.1)
            yield url
        finally:
            server.kill()
            server.wait()


def new_bucket(endpoint: str) -> str:
    name = f"bucket-{uuid.uuid4()}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{name}", method="PUT"), timeout=30).close()
    return name
