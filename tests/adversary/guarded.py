"""A real syncer with a token, an honest learner in it, and what is asked of both while somebody attacks the port."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from pathlib import Path
from typing import Any

from cluster import WAIT_S, SyncerProcess, TrainingThread

from atoll.wire import ClientOptions, fetch_status
from atoll.wire.transport import FETCH_METHOD, LEAVE_METHOD, PUSH_METHOD, SESSION_METHOD, STATUS_METHOD

TOKEN = "the-run-token-of-this-test"
WITH_TOKEN = (("atoll-token", TOKEN),)
METHODS = (STATUS_METHOD, LEAVE_METHOD, SESSION_METHOD, PUSH_METHOD, FETCH_METHOD)
OPTIONS = ("--learners", "1", "--sync-every", "4", "--fragments", "2")


def memory_peak(syncer: SyncerProcess) -> int:
    """The most bytes that the process ever had in memory."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{syncer.process.pid}/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


class GuardedSyncer(SyncerProcess):
    """`descriptors` is the soft and the hard limit that it starts with."""

    def __init__(
        self, folder: Path, *options: str, descriptors: tuple[int, int] | None = None, tls_ca: str = ""
    ) -> None:
        self._tls_ca = tls_ca
        environment = {"ATOLL_TOKEN": TOKEN}
        if descriptors is not None:
            paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
            environment["ATOLL_PRELOAD"] = "few_descriptors"
            environment["TEST_DESCRIPTORS"] = f"{descriptors[0]},{descriptors[1]}"
        super().__init__(folder, *OPTIONS, *options, **environment)

    def status(self) -> dict[str, Any]:
        return asyncio.run(fetch_status(ClientOptions(self.address, token=TOKEN, tls_ca=self._tls_ca)))

    def train(self, name: str = "honest") -> TrainingThread:
        return TrainingThread(self.address, name, token=TOKEN, tls_ca=self._tls_ca or None)

    def wait_commits(self, count: int) -> dict[str, Any]:
        """Until so many more versions were merged, and they are on disk."""
        before = self.wait_for(lambda status: status["committed"], "the run has begun")
        goal = sum(before["versions"]) + count
        status = self.wait_for(lambda status: sum(status["versions"]) >= goal, "the honest learner's work is merged")
        assert status["degraded"] == "" and status["durability"] == "commit", status
        return status

    @property
    def memory_peak(self) -> int:
        return memory_peak(self)

    @property
    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def descriptors_max(self) -> int:
        return resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)[0]

    def limit_descriptors(self, soft: int) -> None:
        hard = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (soft, hard))

    def wait_output(self, words: str) -> str:
        deadline = time.monotonic() + WAIT_S
        while words not in (text := self.output()):
            assert time.monotonic() < deadline, f"never said {words!r}: {text}"
            time.sleep(0.05)
        return text

    def wait_descriptors(self, most: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.descriptors > most:
            assert time.monotonic() < deadline, f"still {self.descriptors} descriptors, {most} at most were to stay"
            time.sleep(0.05)
