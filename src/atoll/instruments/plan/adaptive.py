"""What `adaptive` would come to on the job's links: the run's own controller, shown what it would measure there.

Window after window each region's learners answer as fast as their link lets them, in the codec that they were asked
for; the controller decides, and the next window goes by that. When nothing has changed for a while, that is where the
run settles. The order of its decisions and their reasons are those of a real run; times are the planner's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from atoll.codec import get_codec
from atoll.core import CODECS, Adapted, AdaptiveController, RunMeasured, SyncConfig, quorum_count
from atoll.instruments.plan.job import Job, Region, ranked
from atoll.instruments.plan.rounds import arrival_s, burst, download_s_of, round_times
from atoll.instruments.plan.settings import Settings
from atoll.instruments.plan.traffic import fragment_of

WINDOW_NS = 400_000_000_000
"""Long enough that the controller may take its next decision: it limits how often it changes anything."""
WINDOWS_MAX = 60
CALM_WINDOWS = 6
STAND_INS = 16
"""Learners that answer in place of all."""
ANSWERS_MAX = 20_000
"""Of one window; links on which more fit are wide."""


@dataclass(frozen=True, slots=True)
class Settled:
    """Where the run ends up, and by which decisions."""

    period: int
    overlap: int
    codec_down: str
    codecs: tuple[tuple[str, str], ...]
    """By region."""
    decisions: tuple[Adapted, ...]

    def over(self, settings: Settings) -> Settings:
        """These settings, with what was decided: what the plan's needs and its verdict go by."""
        sync = replace(settings.sync, sync_every=self.period, overlap=self.overlap, codec_down=self.codec_down)
        return replace(settings, sync=sync, codecs_up=self.codecs)


def settle(job: Job, settings: Settings) -> Settled | None:
    """None if what is sent would not follow the network."""
    sync = settings.sync
    if sync.adaptive not in ("on", "network"):
        return None
    controller, places = AdaptiveController(sync), [place for place, _ in job.groups]
    knows, stands_for = frozenset(CODECS.names()), _stand_ins(job)
    named = {place.name for place in places}
    decisions: list[Adapted] = []
    controller.look(0, 0, RunMeasured(1.0, 1.0, sync.fragments), [])
    calm = 0
    for turn in range(WINDOWS_MAX):
        start_ns = turn * WINDOW_NS
        now = replace(sync, sync_every=controller.period, overlap=controller.overlap, codec_down=controller.codec_down)
        for name, place in stands_for.items():
            _answer(job, name, place, now, controller, turn)
        measured = _run(job, replace(settings, sync=now), controller)
        clock = int((start_ns + WINDOW_NS) / 1e9 / job.step_s_median)
        made = controller.look(start_ns + WINDOW_NS, clock, measured, [(name, knows) for name in stands_for])
        decisions += [change for change in made if change.subject == "run" or change.subject in named]
        calm = 0 if made else calm + 1
        if calm == CALM_WINDOWS:
            break
    codecs = tuple((place.name, controller.codec(place.name) or sync.codec_up) for place in places)
    return Settled(controller.period, controller.overlap, controller.codec_down, codecs, tuple(decisions))


def _stand_ins(job: Job) -> dict[str, Region]:
    """Learners by name, so many of each place as there are of all: whether most links are thin is part of a decision.
    The first of a place has its name."""
    share = min(1.0, STAND_INS / job.learners)
    return {
        f"{place.name} {number}" if number else place.name: place
        for place, count in job.groups
        for number in range(max(1, round(share * count * place.learners)))
    }


def _bytes(job: Job, sync: SyncConfig, codec: str) -> int:
    return get_codec(codec or sync.codec_up).size_max(fragment_of(job.parameters, sync).parameters)


def _answer(job: Job, name: str, place: Region, sync: SyncConfig, controller: AdaptiveController, turn: int) -> None:
    """The answers of one learner of this place, one after the other: as many as it is asked for, if they fit."""
    takes_s = arrival_s(job, place, _bytes(job, sync, controller.codec(name)))
    every_s = sync.sync_every * job.step_s_median / sync.fragments
    count = max(1, min(ANSWERS_MAX, int(WINDOW_NS / 1e9 / max(takes_s, every_s))))
    for number in range(count):
        at_ns, asked = turn * WINDOW_NS + int(number * WINDOW_NS / count), turn * ANSWERS_MAX + number + 1
        controller.links.asked(name, 0, asked, at_ns)
        controller.links.answered(name, 0, asked, 1, at_ns + int(min(takes_s * 1e9, WINDOW_NS / count)))


def _run(job: Job, settings: Settings, controller: AdaptiveController) -> RunMeasured:
    sync = settings.sync
    arrivals = [
        (arrival_s(job, place, _bytes(job, sync, controller.codec(place.name))), count * place.learners)
        for place, count in job.groups
    ]
    times = round_times(job, settings)
    quorum_s = ranked(arrivals, quorum_count(sync, job.learners, job.learners))
    round_s = quorum_s + times.merge_s + times.commit_s
    fragment = fragment_of(job.parameters, sync)
    fetches = [(download_s_of(job, place, burst(sync), fragment), n * place.learners) for place, n in job.groups]
    adopt_s = ranked(fetches, job.learners // 2 + 1)
    return RunMeasured(1e9 * job.step_s_median, 1e9 * round_s, sync.fragments, 1e9 * adopt_s)
