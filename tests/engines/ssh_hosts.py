"""A real sshd on loopback that two names lead to, with keys of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from ports import quiet_port
from slurm_cluster import wait_until

PROGRAMS = ("ssh", "ssh-keygen", "/usr/sbin/sshd", "setsid")
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/user_key.pub
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
CLIENT = """
Host paris tokyo
  HostName 127.0.0.1
  Port {port}
  IdentityFile {folder}/user_key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  StrictHostKeyChecking accept-new
  LogLevel ERROR
"""


def missing() -> str:
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (scripts/debian)"
    return "" if os.geteuid() == 0 else "needs root"


class SshHosts:
    def __init__(self, folder: Path) -> None:
        port = quiet_port()
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("host_key", "user_key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        (folder / "sshd.conf").write_text(SERVER.format(port=port, folder=folder))
        self.config = folder / "ssh.conf"
        self.config.write_text(CLIENT.format(port=port, folder=folder))
        log = folder / "sshd.log"
        self._sshd = subprocess.Popen(["/usr/sbin/sshd", "-D", "-f", str(folder / "sshd.conf"), "-E", str(log)])
        wait_until(lambda: self.ask("tokyo", "echo here") == "here", "sshd to answer", log.read_text)

    def ask(self, host: str, command: str) -> str:
        words = ["ssh", "-F", str(self.config), "-o", "BatchMode=yes", host, command]
        return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.strip()

    def close(self) -> None:
        self._sshd.terminate()
        self._sshd.wait()
