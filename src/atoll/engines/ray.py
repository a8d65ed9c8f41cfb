"""A Ray cluster: every process is kept by a detached actor with a placement group of its own, which Ray moves.

Ray starts an actor again when its node is lost, wherever there is room or as soon as the autoscaler brings a node; the
actor starts its process again. The syncer's actor tells the others where it is, and each of them writes that into a
file that its learner reads (ATOLL_SYNCER=@FILE). Nothing but a string crosses between actors.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll.engines.actor import TOLD, ActorSpec, KeptProcess
from atoll.engines.files import job_files
from atoll.engines.job import LaunchJob
from atoll.engines.keyring import keys_folder, make_keys, tls_name
from atoll.engines.parts import JobPart, Places, filled, parts_of, settings_text
from atoll.engines.protocol import LOG_LINES, PartState, Say, checked_part, learners_of, names_of, syncer_must_run
from atoll.engines.tools import wait_until
from atoll.errors import ConfigError, LaunchError

ASK_S_MAX = 10.0
"""An actor answers at once; one that is being moved does not answer."""
LEAVE_S_MAX = 60.0


class RayEngine:
    def __init__(self, job: LaunchJob, say: Say) -> None:
        self._job = job
        self._say = say
        if job.shards.count or job.relays.sites:
            raise ConfigError(
                "[shards] and [relays] are started over ssh, on Slurm and on Kubernetes; leave them away on Ray"
            )
        for island in job.islands:
            if island.nodes > 1:
                raise ConfigError(f"island {island.name} has several nodes, which Ray cannot start; use Slurm or k8s")
        self._folder = Path(job.ray.folder or job.run.folder or f"runs/{job.name}").expanduser().resolve()

    # ------------------------------------------------------------ what is started

    def plan(self) -> str:
        lines = [f"# settings.json\n{settings_text(self._job)}"]
        for name, spec in self._specs(secrets=False).items():
            environment = " ".join(f"{key}={shlex.quote(value)}" for key, value in spec.environment.items())
            lines.append(
                f"# actor {self._actor_name(name)}, resources {spec.resources}\n{environment} {shlex.join(spec.argv)}"
            )
        return "\n".join(lines)

    def _parts(self) -> list[JobPart]:
        keys = f"{self._folder}/keys" if self._job.syncer.has_keys else ""
        told = self._job.syncer.address or f"@{self._folder}/{TOLD}"
        places = Places(str(self._folder), keys, f"{self._folder}/settings.json", told, tls_name(self._job))
        return parts_of(self._job, places)

    def _specs(self, *, secrets: bool, job: LaunchJob | None = None) -> dict[str, ActorSpec]:
        engine = RayEngine(job, self._say) if job is not None else self
        found = {}
        for part in engine._parts():
            for index in range(part.count):
                found[part.named(index)] = engine._spec(part, index, secrets=secrets)
        return found

    def _spec(self, part: JobPart, index: int, *, secrets: bool) -> ActorSpec:
        keys = keys_folder(self._job)
        files = {"settings.json": settings_text(self._job).encode()} if part.role == "syncer" else {}
        files |= {f"files/{name}": data for name, data in job_files(self._job).items()}
        if secrets and keys is not None:
            names = [filled(name, index) for name in part.keys]
            files |= {f"keys/{name}": (keys / name).read_bytes() for name in names}
        size: dict[str, float] = {"CPU": float(part.cpus), **({"GPU": float(part.gpus)} if part.gpus else {})}
        size |= {f"accelerator_type:{part.hardware}": 0.001} if part.hardware else {}
        size |= {"memory": part.memory_gb * 2**30} if part.memory_gb else {}
        return ActorSpec(
            name=part.named(index),
            role=part.role,
            argv=tuple(filled(word, index) for word in part.argv),
            environment={name: filled(value, index) for name, value in part.environment.items()},
            files=files,
            folder=str(self._folder),
            workdir=self._job.run.workdir or f"{self._folder}/files",
            syncer="" if part.role == "syncer" or self._job.syncer.address else self._actor_name("syncer"),
            namespace=self._job.ray.namespace,
            resources=size,
            wait_s=self._job.ray.wait_s,
        )

    # ------------------------------------------------------------ the words

    def submit(self) -> None:
        with self._connected() as ray:
            if alive := self._actors(ray):
                raise LaunchError(
                    f"{', '.join(sorted(alive))} of job {self._job.name} are there already; stop it first"
                )
            make_keys(self._job, learners_of(self._job))
            for spec in self._specs(secrets=True).values():
                self._start(ray, spec)

    def status(self) -> list[PartState]:
        with self._connected() as ray:
            there = self._actors(ray)
            asked = {name: self._ask(ray, name, "look") for name in there}
        names = list(dict.fromkeys([*names_of(self._job), *sorted(there)]))
        return [_state(name, asked.get(name), known=name in there) for name in names]

    def scale(self, counts: Mapping[str, int]) -> None:
        with self._connected() as ray:
            there = self._actors(ray)
            syncer_must_run([_state("syncer", self._ask(ray, "syncer", "look"), known="syncer" in there)], self._job)
            specs = self._specs(secrets=False, job=self._job.scaled(counts))
            kinds = [name for name in there if name.rpartition("-")[0] in counts]
            self._end(ray, [name for name in kinds if name not in specs])
            missing = [name for name in specs if name.rpartition("-")[0] in counts and name not in there]
            make_keys(self._job, missing)
            self._ask(ray, "syncer", "put", self._specs(secrets=True)["syncer"].files)
            for name, spec in self._specs(secrets=True, job=self._job.scaled(counts)).items() if missing else ():
                if name in missing:
                    self._start(ray, spec)

    def stop(self) -> None:
        with self._connected() as ray:
            there = self._actors(ray)
            self._end(ray, [name for name in there if name != "syncer"])
            self._end(ray, [name for name in there if name == "syncer"])

    def logs(self, name: str, lines: int = LOG_LINES) -> str:
        checked_part(self._job, name)
        with self._connected() as ray:
            text = self._ask(ray, name, "tail", lines)
        if text is None:
            raise LaunchError(f"the actor of {name} does not answer; its log is in {self._folder}/logs on its node")
        return str(text)

    # ------------------------------------------------------------ inside

    @contextlib.contextmanager
    def _connected(self) -> Any:
        try:
            import ray
        except ModuleNotFoundError:
            raise LaunchError("Ray is not installed: pip install 'atoll[ray]'") from None
        ours = not ray.is_initialized()
        if ours:
            try:
                address, namespace = self._job.ray.address, self._job.ray.namespace
                ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise LaunchError(
                    f"no Ray cluster at {self._job.ray.address} ({error}); start one, or mend [ray]"
                ) from None
        try:
            yield ray
        finally:
            if ours:
                ray.shutdown()

    def _actor_name(self, name: str) -> str:
        return f"atoll/{self._job.name}/{name}"

    def _actors(self, ray: Any) -> set[str]:
        prefix = self._actor_name("")
        names = ray.util.list_named_actors(all_namespaces=True)
        own = [one["name"] for one in names if one["namespace"] == self._job.ray.namespace]
        return {name.removeprefix(prefix) for name in own if name.startswith(prefix)}

    def _start(self, ray: Any, spec: ActorSpec) -> None:
        """The group keeps the place: the actor is made again in it, on another node if need be."""
        group = ray.util.placement_group([dict(spec.resources)], name=self._actor_name(spec.name), lifetime="detached")
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
        actor = ray.remote(KeptProcess).options(
            name=self._actor_name(spec.name),
            namespace=self._job.ray.namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=4,
            num_cpus=spec.resources["CPU"],
            num_gpus=spec.resources.get("GPU", 0.0),
            scheduling_strategy=strategy,
        )
        actor.remote(spec)
        size = ", ".join(f"{amount:g} {name}" for name, amount in spec.resources.items())
        self._say(f"{spec.name}: an actor with {size}")

    def _ask(self, ray: Any, name: str, method: str, *given: Any) -> Any:
        """None if it does not answer: it waits for a node, or is being moved to one."""
        try:
            actor = ray.get_actor(self._actor_name(name), namespace=self._job.ray.namespace)
            return ray.get(getattr(actor, method).remote(*given), timeout=ASK_S_MAX)
        except (ValueError, ray.exceptions.RayError):
            return None

    def _end(self, ray: Any, names: list[str]) -> None:
        for name in names:
            self._ask(ray, name, "end")
        gone = wait_until(lambda: not any(_runs(self._ask(ray, name, "look")) for name in names), LEAVE_S_MAX)
        if not gone:
            self._say(f"not all of {', '.join(names)} left within {LEAVE_S_MAX:g} s; they are killed")
        for name in names:
            with contextlib.suppress(ValueError):
                ray.kill(ray.get_actor(self._actor_name(name), namespace=self._job.ray.namespace), no_restart=True)
            with contextlib.suppress(ValueError):
                ray.util.remove_placement_group(ray.util.get_placement_group(self._actor_name(name)))


def _runs(look: Any) -> bool:
    return look is not None and look["state"] == "running"


def _state(name: str, look: Any, *, known: bool) -> PartState:
    if look is None:
        return PartState(name, "waiting" if known else "missing", detail="no node yet, or being moved" if known else "")
    starts = f", started {look['starts']} times" if look["starts"] > 1 else ""
    process = f"pid {look['pid']}{starts}" if look["pid"] else ""
    return PartState(name, look["state"], look["host"], "; ".join(filter(None, [process, look["why"]])))
