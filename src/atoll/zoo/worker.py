"""The training process that `atoll train` starts, once per learner:  python -m atoll.zoo.worker CONFIG

CONFIG is a WorkerConfig as JSON text, or the path of a file that holds it. The environment says who this worker is
(ATOLL_RANK, ATOLL_LEARNER, ATOLL_RUN_FOLDER, ATOLL_SLOW_FILE), where the syncer is (ATOLL_SYNCER, ATOLL_TOKEN: read by
atoll.Learner). This is the launcher's other half, which is why it reads the environment.

Exit status: 0 when done or after leaving as it was told to (SIGTERM), 4 if it could not hand over what it had then, 128
+ signal if told so before it had joined, 2 with one line for a wrong setting or corpus, 1 with a traceback otherwise.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from pathlib import Path

from atoll.core import Refusal
from atoll.errors import ConfigError, CorpusError, RefusedError
from atoll.zoo.settings import WorkerConfig, WorkerSeat
from atoll.zoo.stop import StopSignal


def main(arguments: list[str]) -> int:
    """Train as told; gives the exit status."""
    stop = StopSignal()
    try:
        if len(arguments) != 1:
            raise ConfigError("usage: python -m atoll.zoo.worker CONFIG (JSON text, or the path of a JSON file)")
        text = arguments[0] if arguments[0].lstrip().startswith("{") else Path(arguments[0]).read_text()
        config = WorkerConfig.from_json(text)
        seat = WorkerSeat.from_environment(os.environ)

        from atoll.zoo.train import TRAINERS, Workbench  # torch takes seconds: settings are checked before

        bench = Workbench.build(config, seat)
        if bench.corpus.truncated and seat.rank == 0:
            print(f"note: only the first {len(bench.corpus.train)} bytes of {config.corpus} are used", file=sys.stderr)
        TRAINERS[config.method](bench, stop)
    except (ConfigError, CorpusError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RefusedError as error:
        if error.code != Refusal.CLOSED:
            raise
        print(f"note: {error}", file=sys.stderr)  # restarted too late: the others have finished the run
    return 0


if __name__ == "__main__":
    atexit.register(gc.freeze)  # as the `atoll` command does
    sys.exit(main(sys.argv[1:]))
