"""`atoll conform learner`: start a learner for each scene, or wait for one, and play a syncer for it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core import SyncConfig
from atoll.errors import ConfigError
from atoll.instruments.conform import learner_scenes as scenes
from atoll.instruments.conform.learner_exam import Gone, LearnerExam
from atoll.instruments.conform.played_syncer import PlayedSyncer
from atoll.instruments.conform.report import Report

Scene = Callable[[LearnerExam], Awaitable[None]]
SCENES: Mapping[str, Scene] = {
    "a run": scenes.whole_run,
    "an older syncer": scenes.older_syncer,
    "a fenced learner": scenes.fence,
}
END_S = 10.0
"""How long a process may take to end after its scene, before it is killed."""
CONFIG = SyncConfig(sync_every=4, fragments=2, overlap=2, quorum="1")
"""Small rounds. The codecs are the defaults, int4 both ways."""


@dataclass(frozen=True, slots=True)
class LearnerExamOptions:
    command: Sequence[str] = ()
    """Starts one learner; it gets ATOLL_SYNCER, ATOLL_TOKEN and ATOLL_LEARNER. Empty: one comes by itself."""
    listen: str = "127.0.0.1:0"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of the command."""
    patience_s: float = 60.0
    """The longest wait for anything that a learner must do."""
    token: str = ""
    """That calls must carry; drawn if there is a command."""
    config: SyncConfig = CONFIG


async def examine_learner(report: Report, options: LearnerExamOptions, say: Callable[[str], None]) -> None:
    """Fill the report. Without a command only the first scene is played: the others end their learner."""
    for name, scene in SCENES.items():
        if not options.command and scene is not scenes.whole_run:
            continue
        await _play(name, scene, report, options, say)
    for clause in report.clauses:
        report.untried(clause, "the scene was not played, or ended before")


async def _play(
    name: str, scene: Scene, report: Report, options: LearnerExamOptions, say: Callable[[str], None]
) -> None:
    token = options.token or (secrets.token_urlsafe(16) if options.command else "")
    exam = LearnerExam(report, options.config, token=token, patience_s=options.patience_s)
    syncer = PlayedSyncer(exam)
    await syncer.start(options.listen)
    say(f"{name}: a syncer is played at {syncer.address}")
    process = await _start(options, syncer.address, token) if options.command else None
    if process is not None:
        exam.alive = lambda: process.returncode is None
    try:
        await scene(exam)
    except Gone as gone:
        say(f"{name}: it could not go on without {gone}")
    finally:
        await syncer.stop()
        if process is not None:
            await _end(process, say)


async def _start(options: LearnerExamOptions, address: str, token: str) -> asyncio.subprocess.Process:
    own = {"ATOLL_SYNCER": address, "ATOLL_TOKEN": token, "ATOLL_LEARNER": "examined"}
    try:
        return await asyncio.create_subprocess_exec(
            *options.command,
            env={**options.environment, **own},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError(f"cannot start {options.command[0]}: {error.strerror}; mend the command after --") from None


async def _end(process: asyncio.subprocess.Process, say: Callable[[str], None]) -> None:
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        say("the learner's process did not end by itself; it is killed")
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
