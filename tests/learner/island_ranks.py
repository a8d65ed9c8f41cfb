"""Ranks of an island for tests: real processes with gloo between them, forked from one that has imported torch."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

WAIT_S = 300.0
"""No wait in a test is longer; nothing is asserted about how long things take."""
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["island_work"])


class Ranks:
    """Processes that run `work(rank, size, *arguments)` inside of a process group; what it returns comes back."""

    def __init__(
        self, size: int, folder: Path, work: Callable[..., Any], *arguments: Any, timeout_s: float = 60.0
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            here, there = _CONTEXT.Pipe(duplex=False)
            given = (there, rank, size, str(folder), timeout_s, work, arguments)
            process = _CONTEXT.Process(target=_main, args=given, daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self.processes.append(process)

    def results(self) -> list[Any]:
        """What each rank returned, or the text of what it raised; None where it was killed."""
        deadline = time.monotonic() + WAIT_S
        found = []
        for pipe, process in zip(self._pipes, self.processes, strict=True):
            answer = None
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    answer = pipe.recv()
            except EOFError:
                pass
            found.append(answer)
            process.join(max(1.0, deadline - time.monotonic()))
        self.kill()
        return found

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()

    def output(self, rank: int) -> str:
        return (self.folder / f"rank-{rank}.log").read_text()


def _main(
    pipe: Connection, rank: int, size: int, folder: str, timeout_s: float, work: Callable[..., Any], arguments: Any
) -> None:
    import torch
    import torch.distributed as dist

    log = os.open(f"{folder}/rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.8 * WAIT_S)  # where a rank that hangs does so is in its log
    try:
        store = dist.FileStore(f"{folder}/store", size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s))
        answer = work(rank, size, *arguments)
    except BaseException as error:
        traceback.print_exc()
        answer = f"{type(error).__name__}: {error}"
    pipe.send(answer)
    pipe.close()
    os._exit(0)  # other ranks may be gone: gloo's threads would wait for them
