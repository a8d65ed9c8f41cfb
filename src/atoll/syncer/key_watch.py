"""Revocation takes effect while the syncer runs: the registry of keys is looked at again and again."""

from __future__ import annotations

import asyncio

from atoll.core import effects as fx
from atoll.errors import ConfigError
from atoll.keys import KeyFile
from atoll.observe import events
from atoll.syncer.shell import SyncerShell
from atoll.wire import RunningServer

LOOK_S = 1.0
"""Between two looks at the file: one stat, and as long as a revoked learner may still be served."""


async def watch_keys(keys: KeyFile, shell: SyncerShell, server: RunningServer) -> None:
    """Whoever's key has ended is out: no message, push or fetch of it counts from here on."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            ended = keys.look()
        except ConfigError as error:
            shell.news.emit(events.Warned("syncer", f"{error}; the keys that were read before still hold"))
            continue
        for name, detail in ended.items():
            shell.apply(fx.KeyRevoked(name, detail))
            server.revoke(name, detail)
            shell.platform.forget_sender(name)
