"""Says why a learner has not joined yet: the first failure soon and with its true cause, then only what is new."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import Protocol

from atoll.errors import AtollError, CertificateError
from atoll.wire import ClientOptions, find_cause

FIRST_LOOK_S = 1.0
"""A syncer that is there answers within this, and most joiners need no doctor."""
LOOK_EVERY_S = 2.0
"""Between two looks while a learner keeps trying: one connection each."""
SAY_AGAIN_S = 30.0
"""The same cause is said again so often, so that somebody who looks at the terminal later knows that it still holds."""
AGREE_S = 1.0
AGREE_LOOK_S = 0.05
"""A certificate that cannot be trusted ends it all, once gRPC has tried too. Kernels are compiled before it does."""


class LinkView(Protocol):
    """What the doctor sees of the shell."""

    @property
    def ever_linked(self) -> bool: ...
    @property
    def last_down(self) -> str: ...
    def give_up(self, error: AtollError) -> None: ...


class Doctor:
    """A thread beside a learner that joins. It ends when the learner is in, or with `stop`."""

    def __init__(self, options: ClientOptions, learner: str, link: LinkView, *, patience_s: float) -> None:
        self.cause = ""
        """What kept the learner out at the last look."""
        self._options = options
        self._learner = learner
        self._link = link
        self._patience_s = patience_s
        self._over = threading.Event()
        self._said = ""
        self._said_s = 0.0
        self._thread = threading.Thread(target=self._run, name="atoll-doctor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def _run(self) -> None:
        pause_s = FIRST_LOOK_S
        while not self._over.wait(pause_s) and not self._link.ever_linked:
            found = find_cause(self._options)
            final = found is not None and found.final
            tried = self._tried(AGREE_S if final else 0.0)
            if self._over.is_set() or self._link.ever_linked:
                return
            if found is not None and final and tried:
                # gRPC has found no way either, so this is no detour of the doctor's own (a proxy, say).
                self._link.give_up(CertificateError(found.text))
                return
            self.cause = found.text if found is not None else tried
            self._tell(patient=not final)
            pause_s = LOOK_EVERY_S

    def _tried(self, wait_s: float) -> str:
        """Why gRPC's own last attempt failed; it may be about to make its first."""
        deadline_s = time.monotonic() + wait_s
        while not self._link.last_down and time.monotonic() < deadline_s and not self._over.wait(AGREE_LOOK_S):
            pass
        return self._link.last_down

    def _tell(self, *, patient: bool) -> None:
        now_s = time.monotonic()
        if not self.cause or (self.cause == self._said and now_s - self._said_s < SAY_AGAIN_S):
            return
        first = not self._said
        self._said, self._said_s = self.cause, now_s
        more = f" (trying on for up to {self._patience_s:g} s)" if first and patient else ""
        with contextlib.suppress(ValueError, OSError):  # whoever started this may have closed it
            print(f"atoll: {self._learner} has not joined yet: {self.cause}{more}", file=sys.stderr, flush=True)
