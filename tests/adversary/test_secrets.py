"""A user of the same machine looks for secrets: in files, in command lines, in what is printed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from secrets import token_hex

import pytest
from buckets import new_bucket, s3_server
from certificates import certificate
from cluster import SyncerProcess
from ports import quiet_port

pytest.importorskip("s3fs", reason="pip install 'atoll[s3]'")
pytest.importorskip("moto.server", reason="pip install 'atoll[dev]'")

WAIT_S_MAX = 180.0
"""Nothing is asserted about time; this only ends a test that hangs."""
OF_THE_AWS = f"aws-secret-{token_hex(8)}"  # drawn: another run of this test may be on this machine
OF_THE_OPTIONS = f"option-secret-{token_hex(8)}"
SCRIPT = """
import os, time
from pathlib import Path
import torch, atoll

Path("by-the-script").write_text("for everybody")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
with atoll.Learner(model, optimizer) as learner:
    while not learner.done:
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step(); optimizer.zero_grad()
        learner.step(tokens=8)
        time.sleep(0.02)
"""


def words_of_everybody() -> str:
    """What /proc shows to every user of the machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return "\n".join(found)


def test_a_run_with_a_token_and_credentials_leaves_them_nowhere_but_in_its_token_file(tmp_path: Path) -> None:
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    with s3_server(tmp_path) as endpoint:
        environment = {
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": OF_THE_AWS,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": str(tmp_path / "none"),
            "ATOLL_SNAPSHOT_OPTIONS": json.dumps({"key": "somebody", "secret": OF_THE_OPTIONS}),
        }
        options = ("--snapshots", f"s3://{new_bucket(endpoint)}/run", "--snapshot-every", "1s", "--record")
        options += ("--snapshot-options", json.dumps({"endpoint_url": endpoint}))
        options += ("--out", str(run), "--learners", "2", "--tokens-budget", "4000", "--json")
        process = subprocess.Popen(
            [sys.executable, "-m", "atoll", "run", *options, "--", "python", str(script)],
            cwd=tmp_path,
            env={**os.environ, **environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            umask=0o022,
        )
        seen, deadline_s = "", time.monotonic() + WAIT_S_MAX
        while process.poll() is None and time.monotonic() < deadline_s:
            seen += words_of_everybody()
            time.sleep(0.3)
        printed, _ = process.communicate(timeout=WAIT_S_MAX)
    assert process.returncode == 0, printed
    assert "atoll syncer" in seen and str(script) in seen  # the processes of this run were among them
    token = (run / "token").read_text()
    assert len(token) == 32
    secrets = (token, OF_THE_AWS, OF_THE_OPTIONS)
    files = [path for path in run.rglob("*") if path.is_file()]
    assert any("snapshot_written" in path.read_text() for path in files if path.suffix == ".jsonl")  # they were used
    assert {path.name for path in files if any(one.encode() in path.read_bytes() for one in secrets)} == {"token"}
    assert not any(one in printed or one in seen for one in secrets)

    assert run.stat().st_mode & 0o777 == 0o700
    open_to_others = [str(path) for path in run.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert open_to_others == []
    assert (tmp_path / "by-the-script").stat().st_mode & 0o777 == 0o644  # the user's files are the user's business


def refused(folder: Path, *options: str, **environment: str) -> str:
    with pytest.raises(AssertionError) as raised:
        SyncerProcess(folder, *options, **environment)
    return str(raised.value)


def test_a_password_in_an_address_is_shown_to_nobody(tmp_path: Path) -> None:
    """Neither that of the endpoint nor that of the URL, whoever quotes it."""
    nobody = quiet_port()
    for url, more in (
        ("s3://bucket/run", {"endpoint_url": f"http://someone:{OF_THE_AWS}@127.0.0.1:{nobody}"}),
        (f"sftp://someone:{OF_THE_AWS}@127.0.0.1:{nobody}/run", {}),
        (f"unknown://someone:{OF_THE_AWS}@127.0.0.1/run", {}),
    ):
        said = refused(
            tmp_path,
            *("--snapshots", url),
            ATOLL_SNAPSHOT_OPTIONS=json.dumps({**more, "key": "a", "secret": OF_THE_OPTIONS} if more else {}),
            AWS_MAX_ATTEMPTS="1",
            AWS_CONFIG_FILE=str(tmp_path / "none"),
        )
        told = said + "".join(path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file())
        assert "cannot be" in told or "needs a package" in told, told
        assert OF_THE_AWS not in told and OF_THE_OPTIONS not in told, told


def test_a_syncer_takes_its_token_from_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "token"
    run.mkdir()
    file.write_text("secret-of-a-file\n")
    file.chmod(0o640)
    pem, key = certificate(tmp_path, "127.0.0.1")
    options = ("--token-file", str(file), "--tls-certificate", pem, "--tls-key", key)
    assert f"chmod 600 {file}" in refused(run, *options)
    file.chmod(0o600)
    syncer = SyncerProcess(run, *options, host="0.0.0.0")

    def status(*more: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "atoll", "status", str(run), *more],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=WAIT_S_MAX,
        )

    assert status("--token-file", str(file)).returncode == 0
    assert status(ATOLL_TOKEN_FILE=str(file)).returncode == 0
    assert status("--token-file", str(file), ATOLL_TOKEN="of another run").returncode == 0
    assert status(ATOLL_TOKEN="wrong").returncode == 2
    typed = status("--token", "secret-of-a-file")
    assert typed.returncode == 0 and "every user of this machine" in typed.stderr
    assert status("--token", "secret-of-a-file", "--token-file", str(file)).returncode == 2
    assert "secret-of-a-file" not in syncer.output()
    assert syncer.stop() == 0
