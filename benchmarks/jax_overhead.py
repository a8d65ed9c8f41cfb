"""What Atoll costs a JAX learner: steps per second with `learner.step` over steps per second without, in one run.

    python benchmarks/jax_overhead.py
    python benchmarks/jax_overhead.py --layers 8 --width 1024 --batch 64
    python benchmarks/jax_overhead.py --report docs/results/islands.md     # adds a dated section to the page

One learner and a real syncer process on one machine, int4 both ways, with the default settings. The model is a stack of
dense layers with optax's AdamW, compiled, with donated arguments. Segments with and without Atoll alternate, so that
whatever else the machine does hits both alike; each segment with Atoll is set against the mean of its two neighbours
without, and the ratio is the median of these, with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import atoll.jax

SEGMENTS_MIN = 4
"""Below that there are no quartiles to speak of."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--segments", type=int, default=20, help="with Atoll, at most; one more without")
    parser.add_argument("--seconds", type=float, default=30.0, help="for all segments: slow machines make fewer")
    parser.add_argument("--steps", type=int, default=24, help="steps per segment")
    parser.add_argument("--sync-every", type=int, default=8, help="H")
    parser.add_argument("--report", default="", help="a Markdown page that gets a dated section")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = f"-m atoll syncer --listen 127.0.0.1:0 --learners 1 --sync-every {options.sync_every} --run-folder"
        syncer = subprocess.Popen([sys.executable, *command.split(), folder], stdout=subprocess.DEVNULL)
        try:
            found = measure(options, address_in(Path(folder)))
        finally:
            syncer.terminate()
            syncer.wait()
    print(section(options, found))
    if options.report:
        with Path(options.report).open("a") as page:
            page.write(section(options, found))


COST = (
    "| what | parameters | step | steps/s with over without, median | quartiles | pairs of segments | H | when, where |"
)


def section(options: argparse.Namespace, found: dict[str, Any]) -> str:
    """What was measured, as a row of the page's first table."""
    low, high = found["quartiles"]
    row = [f"JAX, 1 process, {found['device']}", f"{found['parameters']:,}", f"{found['step_ms']:g} ms"]
    row += [f"{found['ratio']:.4f}", f"{low:.4f} to {high:.4f}", f"{found['segments']} of {options.steps} steps"]
    row += [str(options.sync_every), f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores"]
    given = ((name.replace("_", "-"), value) for name, value in vars(options).items() if name != "report")
    command = " ".join(f"--{name} {value}" for name, value in given)
    return f"""
### {time.strftime("%Y-%m-%d")}, {os.cpu_count()} cores, {found["device"]}

    python benchmarks/jax_overhead.py {command}

{COST}
{"|---" * (COST.count("|") - 1)}|
| {" | ".join(row)} |
"""


def address_in(folder: Path) -> str:
    deadline_s = time.monotonic() + 60
    while not (folder / "syncer.json").exists():
        assert time.monotonic() < deadline_s, "the syncer did not start"
        time.sleep(0.05)
    return str(json.loads((folder / "syncer.json").read_text())["address"])


def measure(options: argparse.Namespace, address: str) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), options.layers)
    params = [jax.random.normal(key, (options.width, options.width)) / options.width**0.5 for key in keys]
    optimizer = optax.adamw(1e-3)

    @partial(jax.jit, donate_argnums=(0, 1))
    def train(params: Any, state: Any, x: Any) -> Any:
        def loss_of(layers: Any) -> Any:
            y = x
            for layer in layers:
                y = jnp.tanh(y @ layer)
            return jnp.square(y - x).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    x = jax.random.normal(jax.random.key(1), (options.batch, options.width))
    rates: dict[bool, list[float]] = {False: [], True: []}
    with atoll.jax.Learner(params, optimizer.init(params), address=address, learner_id="jax") as learner:
        params, state = learner.params, learner.opt_state

        def segment(steps: int, with_atoll: bool) -> float:
            nonlocal params, state
            jax.block_until_ready(params)
            began_s = time.perf_counter()
            for _ in range(steps):
                params, state, loss = train(params, state, x)
                if with_atoll:
                    params = learner.step(params, state, tokens=options.batch, loss=loss)
            jax.block_until_ready(params)
            return steps / (time.perf_counter() - began_s)

        segment(4 * options.sync_every, True)  # compiles the gathers and scatters of every fragment
        rate = segment(options.steps, False)
        segments = max(SEGMENTS_MIN, min(options.segments, int(options.seconds * rate / options.steps / 2 - 1)))
        for number in range(2 * segments + 1):
            rates[number % 2 == 1].append(segment(options.steps, number % 2 == 1))
        segment(1, True)  # what the learner was given before has been donated since
        versions = learner.versions()
    plain = rates[False]
    ratios = [with_atoll * 2 / (plain[i] + plain[i + 1]) for i, with_atoll in enumerate(rates[True])]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "parameters": options.layers * options.width**2,
        "step_ms": round(1000 / statistics.median(plain), 2),
        "ratio": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "segments": len(ratios),
        "versions": list(versions),
        "device": str(jax.devices()[0]),
    }


if __name__ == "__main__":
    main()
