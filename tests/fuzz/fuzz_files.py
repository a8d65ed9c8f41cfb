"""What a run folder holds besides the syncer's state: settings, listings, addresses, events."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from fuzz_engine import ODD, Make, Target, mutated, mutated_json, scratch

from atoll.errors import ConfigError, LaunchError
from atoll.launch.config import describe, resolved, run_config, train_config
from atoll.launch.folder import RunFolder, syncer_of
from atoll.launch.keeper import SyncerKeeper
from atoll.launch.options import read_config_file
from atoll.launch.running import joined_processes, main_processes
from atoll.launch.stored import read_run
from atoll.observe import events
from atoll.observe.lines import decode, encode
from atoll.observe.reader import read_events

TOML_VALUES = (
    *(
        "1",
        "0",
        "-1",
        "3.5",
        "inf",
        "nan",
        "-inf",
        '""',
        '"all"',
        '"50%"',
        '"1"',
        "true",
        "[]",
        "[1]",
        "{a=1}",
        "1979-05-27",
    ),
    *(
        "0x" + "f" * 5000,
        "1" * 4000,
        "1" + "0" * 400,
        "1e999",
        '"mix:0.5"',
        '"cuda:x"',
        '"' + "z" * 2000 + '"',
        '"""\n"""',
    ),
    *('"1h"', '"9' + "9" * 400 + 'h"', '"\\u0000"', "'''x'''", "0b1", "1_0", '"{}"', '"[["', "[" * 3000),
)


def _toml(names: list[str], samples: list[bytes]) -> Make:
    by_bytes = mutated(samples)

    def make(rng: Random) -> bytes:
        if rng.random() < 0.3:
            return by_bytes(rng)
        chosen = rng.sample(names, rng.choice((1, 1, 2, 4)))
        return "\n".join(f"{name} = {rng.choice(TOML_VALUES)}" for name in chosen).encode()

    return make


def in_file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    def parse(data: bytes) -> Any:
        path.write_bytes(data)
        return read()

    return parse


def _settings(path: Path) -> Any:
    """What `--config FILE` goes through, up to the lines that are printed and the file that is written."""
    values = read_config_file(path)
    config, _ = train_config(values)
    json.dumps([describe(config), resolved(config)])
    return config


def _run_settings(path: Path) -> Any:
    config = run_config(read_config_file(path))
    json.dumps([describe(config), resolved(config)])
    return config


def _event_samples() -> list[bytes]:
    samples = [
        events.RunStarted("decoupled", 2, 100, 24, 4, "int4", "int4", 10**6, "a title"),
        events.RunFinished("done", 1.25, 10.0),
        events.SyncerRecovered("slots", True, [1, 2], 5, 6, ["a problem"]),
        events.Committed(0, 1, 2, ["a", "b"], 10, 5, 6, 1.5, 0.5, 2**63, [1, 2], [0.5, 0.5], 1, 2),
        events.SyncerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, {"lost": 3}),
        events.Warned("a", "text"),
    ]
    return [encode(17, event).rstrip(b"\n") for event in samples]


def _check_event(found: Any) -> None:
    """What was read can be written again, as it is when runs are joined or thinned."""
    if found is not None:
        assert isinstance(found[0], int)
        encode(*found)


def _events(folder: Path) -> Callable[[bytes], Any]:
    (folder / "events").mkdir(exist_ok=True)
    (folder / "events" / "other.jsonl").write_bytes(b"\n".join(_event_samples()) + b"\n")

    def read() -> Any:
        found = list(read_events(folder))
        assert [stamped[0] for stamped in found] == sorted(stamped[0] for stamped in found) or len(found) > 6
        return found

    return in_file(folder / "events" / "one.jsonl", read)


def _announced(folder: RunFolder) -> Any:
    keeper = SyncerKeeper.__new__(SyncerKeeper)
    keeper._folder, keeper._file = folder, folder.syncer_file
    return keeper._announced_by(17)


def file_targets() -> list[Target]:
    folder = scratch("files")
    options = sorted(resolved(train_config({})[0]).keys() - {"derived"})
    run_options = sorted(resolved(run_config({})).keys() - {"derived"})
    toml = [b"learners = 4\nquorum = '50%'\nouter_lr = 0.7\n", b'durability = "commit"\nsnapshot_every = "5m"\n']
    stored = resolved(train_config({"learners": 2})[0])
    ran = {**resolved(run_config({})), "command": ["python", "train.py"], "started_in": "."}
    documents = [json.dumps(stored).encode(), json.dumps(ran).encode()]
    run = RunFolder(folder / "run")
    run.path.mkdir(exist_ok=True)
    listing = json.dumps([{"role": "learner", "id": "a", "pid": 999_999_999, "started": "5"}]).encode()
    address = json.dumps({"address": "127.0.0.1:5", "pid": 17, "run": "r"}).encode()
    lines = _event_samples()
    several = [b"\n".join(lines) + b"\n", lines[0] + b"\n" + lines[2][:20]]

    def noisy_line(rng: Random) -> bytes:
        return b'{"t_ns":1,"kind":"run_finished","reason":"x","wall_s":1,"eval_loss":' + rng.choice(ODD).encode() + b"}"

    def processes() -> Any:
        found = [*main_processes(run), *joined_processes(run)]
        assert all(isinstance(one.pid, int) and one.alive in (False, True) for one in found)
        return found

    return [
        Target(
            "launch.settings",
            _toml(options, toml),
            in_file(folder / "a.toml", lambda: _settings(folder / "a.toml")),
            1000,
            (ConfigError,),
        ),
        Target(
            "launch.run_settings",
            _toml(run_options, toml),
            in_file(folder / "b.toml", lambda: _run_settings(folder / "b.toml")),
            600,
            (ConfigError,),
        ),
        Target(
            "launch.stored_run",
            mutated_json(documents),
            in_file(run.config_file, lambda: read_run(run.path)),
            800,
            (ConfigError, LaunchError),
        ),
        Target("launch.processes", mutated_json([listing]), in_file(run.processes_file, processes), 1000),
        Target(
            "launch.syncer_file",
            mutated_json([address]),
            in_file(run.syncer_file, lambda: syncer_of(run.path)),
            1000,
            (LaunchError,),
        ),
        Target("launch.announced", mutated_json([address]), in_file(run.syncer_file, lambda: _announced(run)), 600),
        Target(
            "observe.line",
            lambda rng: (
                mutated_json(lines)(rng)
                if rng.random() < 0.6
                else mutated(lines)(rng)
                if rng.random() < 0.7
                else noisy_line(rng)
            ),
            decode,
            8000,
            check=_check_event,
        ),
        Target("observe.events", mutated(several), _events(folder), 800, memory=lambda size: 2**22 + 64 * size),
    ]
