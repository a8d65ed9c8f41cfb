"""How a script ends that the run does not want: in one sentence instead of a traceback through Atoll."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from atoll.errors import AtollError, ConfigError, LocalProtocolError
from atoll.learner.environment import debugging

HERE = str(Path(__file__).parent.parent)
"""Where Atoll's own code is: a setting is mended elsewhere."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def end_in_one_sentence() -> None:
    """From here on, a script that dies because the syncer said no or is not there, or of a wrong setting, says so in
    one sentence, with status 1 as before. Other errors keep their tracebacks; with ATOLL_DEBUG=1 so do these."""
    if not isinstance(sys.excepthook, LastWords):
        sys.excepthook = LastWords(sys.excepthook)


class LastWords:
    """A hook for exceptions that nobody caught, in front of the one that was there before."""

    def __init__(self, before: Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if debugging() or not _tells_all(error):
            self._before(kind, error, trace)
            return
        where = _place(trace) if isinstance(error, ConfigError) else ""
        print(f"atoll: {error}{where}", file=sys.stderr, flush=True)


def _tells_all(error: BaseException) -> bool:
    """Whether its sentence is all that one needs: not where the API was misused, nor where another error came first."""
    if not isinstance(error, AtollError) or isinstance(error, LocalProtocolError):
        return False
    first = error.__context__
    return first is None or error.__suppress_context__ or isinstance(first, AtollError)


def _place(trace: TracebackType | None) -> str:
    """The line of the user's own code in which a setting was given. What has no file (`<string>`: the constructor that
    dataclasses make) is nobody's."""
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith("<")]
    own = [frame for frame in frames if not frame.filename.startswith(HERE)]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
