"""Where a learner finds its run: arguments first, then the environment that `atoll run` and `atoll train` set.

This is the launcher's other half, and the only place besides `cli` and `launch` that reads the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import ConfigError
from atoll.learner.leave_deadline import LEAVE_S_MAX, SIGTERM_S
from atoll.metrics import metered
from atoll.observe import EventWriter, NullWriter, Writer
from atoll.preload import preload
from atoll.private import make_private_folder
from atoll.wire import LEARNER_CHARS_MAX, read_token, split_key

SITE_CHARS_MAX = 100
"""A zone, a city: it is written with every start of a learner."""


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """One learner's place in a run."""

    address: str
    learner: str
    token: str = field(repr=False)
    tls_ca: str
    run_folder: Path | None
    clear_host: str = ""
    """ATOLL_CLEAR_HOST: see ClientOptions. Only a storm between network namespaces sets it."""
    tls_name: str = ""
    """ATOLL_TLS_NAME: the name in the syncer's certificate, where it is reached under another one."""
    rank: int | None = None
    """ATOLL_RANK, where it is given."""
    world: int | None = None
    """ATOLL_WORLD, where it is given."""
    metrics: str = ""
    """ATOLL_METRICS: HOST:PORT where a Prometheus may ask this process."""
    leave_s: int = LEAVE_S_MAX
    """ATOLL_LEAVE_S: the most that handing over may take when a script leaves by itself."""
    sigterm_s: int = int(SIGTERM_S)
    """ATOLL_SIGTERM_S: the same after SIGTERM, behind which somebody may stand who kills."""
    site: str = ""
    """ATOLL_SITE: where this machine is, for whoever looks at the run."""

    def writer(self) -> Writer:
        """Events go to a file of this process's own, so that a restarted learner never writes into the old one's."""
        return metered(self._plain_writer(), self.metrics, role="learner", name=self.learner, folder=self.run_folder)

    def _plain_writer(self) -> Writer:
        if self.run_folder is None:
            return NullWriter()
        with contextlib.suppress(OSError):  # a disk that takes nothing is no reason not to train
            make_private_folder(self.run_folder)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", self.learner)[:100]
        return EventWriter(self.run_folder / "events" / f"learner-{name}-{os.getpid()}.jsonl")


def debugging() -> bool:
    """Whether tracebacks are wanted where a sentence would do."""
    return bool(os.environ.get("ATOLL_DEBUG"))


def find_place(
    *,
    address: str | None,
    learner: str | None,
    token: str | None,
    tls_ca: str | None,
    run_folder: str | Path | None,
) -> LearnerPlace:
    """Fill what is not given from ATOLL_SYNCER, ATOLL_LEARNER, ATOLL_TOKEN (or ATOLL_TOKEN_FILE), ATOLL_TLS_CA,
    ATOLL_TLS_NAME, ATOLL_RUN_FOLDER, ATOLL_RANK, ATOLL_WORLD, ATOLL_LEAVE_S and ATOLL_SIGTERM_S. Before that, load what
    ATOLL_PRELOAD names.

    A learner with a key of its own has the key's name. Any other without a name gets one that nobody else has: machines
    share host names (images, containers) and even process ids (1 in every container), and two learners of one id would
    fence each other out. A process that is to continue from its checkpoint must be given its name."""
    preload(os.environ.get("ATOLL_PRELOAD", ""))
    where = address or os.environ.get("ATOLL_SYNCER", "")
    if not where:
        raise ConfigError(
            "no syncer to join: start this script with `atoll run --learners 2 -- python script.py`, or start "
            "`atoll syncer` and set ATOLL_SYNCER=host:port (or pass address=)"
        )
    folder = run_folder or os.environ.get("ATOLL_RUN_FOLDER") or None
    secret = token if token is not None else _token()
    return LearnerPlace(
        address=where,
        learner=_learner_id(learner or os.environ.get("ATOLL_LEARNER", "") or split_key(secret)[0]),
        token=secret,
        tls_ca=tls_ca if tls_ca is not None else os.environ.get("ATOLL_TLS_CA", ""),
        run_folder=Path(folder) if folder else None,
        clear_host=os.environ.get("ATOLL_CLEAR_HOST", ""),
        tls_name=os.environ.get("ATOLL_TLS_NAME", ""),
        rank=_number("ATOLL_RANK", low=0),
        world=_number("ATOLL_WORLD", low=1),
        metrics=os.environ.get("ATOLL_METRICS", ""),
        leave_s=_number("ATOLL_LEAVE_S", low=1) or LEAVE_S_MAX,
        sigterm_s=_number("ATOLL_SIGTERM_S", low=1) or int(SIGTERM_S),
        site=os.environ.get("ATOLL_SITE", "")[:SITE_CHARS_MAX],
    )


def _learner_id(given: str) -> str:
    end = f"-{secrets.token_hex(4)}"
    name = given or socket.gethostname()[: LEARNER_CHARS_MAX - len(end)] + end
    if len(name) > LEARNER_CHARS_MAX or not (name.isascii() and name.isprintable()):
        raise ConfigError(
            f"a learner's id has 1 to {LEARNER_CHARS_MAX} printable ASCII characters, not {name!r}; give another one "
            "(ATOLL_LEARNER)"
        )
    return name


def _token() -> str:
    return read_token(os.environ.get("ATOLL_TOKEN", ""), os.environ.get("ATOLL_TOKEN_FILE", ""))


def _number(name: str, *, low: int) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text) >= low):
        raise ConfigError(f"{name} must be a whole number from {low} on, not {text!r}; mend it or leave it away")
    return int(text)
