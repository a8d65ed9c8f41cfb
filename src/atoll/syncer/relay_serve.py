"""Run one relay process: listen, pass on, stop cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from atoll.errors import ConfigError
from atoll.metrics import RelayMetrics, metered_as
from atoll.observe import NullWriter
from atoll.syncer.options import RelayOptions
from atoll.syncer.relay import Relay
from atoll.syncer.shard_serve import announce
from atoll.wire import ServerOptions, attach_handler, fetch_status, memory_bytes, serve

CACHE_SHARE = 0.25
"""Of the machine's memory, at most, for what was fetched. Learners of a site want the same few versions, so that less
does; what is beyond is fetched again."""

ADDRESS_FILE = "relay.json"
COUNT_S = 1.0
"""How often its metrics are brought up to date."""


def run(options: RelayOptions) -> int:
    return asyncio.run(_serve(options))


async def _serve(options: RelayOptions) -> int:
    told = await fetch_status(options.upstream)  # a wrong address or token is said now, not to every learner
    if "shard" in told:
        raise ConfigError(
            f"{options.upstream.address} is a shard, which has no sessions; give --upstream the address of the syncer "
            "that leads it, or of another relay"
        )
    relay = Relay(options.upstream, int(memory_bytes() * CACHE_SHARE), merge=options.merge)
    wanted = ServerOptions(
        listen=options.listen,
        bulk_port=options.bulk_port,
        token=options.token,
        tls_certificate=options.tls_certificate or "",
        tls_key=options.tls_key or "",
    )
    server = await serve(relay, wanted, attach=attach_handler(relay.answering))
    relay.end_session = server.close_session
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"atoll relay listens on {server.address} for {options.upstream.address}", flush=True)
    announce(options.run_folder, ADDRESS_FILE, server.address, "relay")
    counted = RelayMetrics()
    writer = metered_as(
        counted, NullWriter(), options.metrics, role="relay", name="relay", folder=None, told_in=options.metrics_folder
    )
    while not stop.is_set():
        counted.told(relay.status())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), COUNT_S)
    writer.close()
    await server.cut()  # its learners go on to the next address; an end in order would let leaving ones go
    await relay.close()
    return 0
