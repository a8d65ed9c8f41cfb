"""The metrics of a learner, from its events."""

from __future__ import annotations

import math
import time

from atoll.metrics.families import Families
from atoll.observe import Event, events

SPENT = ("compute", "stall", "adopt", "snapshot", "overhead")


class LearnerMetrics:
    """`take` is called with every event of the learner."""

    def __init__(self) -> None:
        f = self.families = Families()
        f.counter("atoll_learner_steps", "Optimizer steps.", "learner")
        f.counter("atoll_learner_tokens", "Tokens processed.", "learner")
        f.counter("atoll_learner_time_seconds", "Where this learner's time went.", "learner", "category")
        f.gauge("atoll_learner_loss", "Training loss, lately.", "learner")
        f.gauge("atoll_learner_published_loss", "Loss of the published model, if this learner measures it.", "learner")
        f.gauge("atoll_learner_fragments_behind", "Versions published and not adopted, over all fragments.", "learner")
        f.gauge("atoll_learner_link_up", "1 while there is a link to the syncer.", "learner")
        f.gauge("atoll_learner_last_step_timestamp_seconds", "When this learner last reported steps.", "learner")
        f.counter("atoll_learner_pushes", "Contributions that were sent, by outcome.", "learner", "outcome")
        f.counter("atoll_learner_push_bytes", "Bytes of contributions.", "learner")
        f.counter("atoll_learner_push_seconds", "Time that sending took.", "learner")
        f.counter("atoll_learner_fetch_bytes", "Bytes of published versions.", "learner")
        f.counter("atoll_learner_fetch_seconds", "Time that fetching took.", "learner")
        f.counter("atoll_learner_adoptions", "Published versions that were taken over.", "learner")
        f.counter(
            "atoll_learner_discarded_tokens", "Tokens of single fragments that will not be merged.", "learner", "cause"
        )
        f.counter("atoll_learner_checkpoints", "Checkpoints of its own.", "learner")
        f.gauge("atoll_learner_last_checkpoint_timestamp_seconds", "When the newest was written.", "learner")
        f.counter("atoll_warnings", "Warnings that this process gave out.")

    def take(self, event: Event) -> None:
        f, now_s = self.families, time.time()
        match event:
            case events.LearnerSteps(learner=learner):
                self._steps(event)
                f.set("atoll_learner_last_step_timestamp_seconds", now_s, learner)
            case events.LearnerPushed(learner=learner):
                f.add("atoll_learner_pushes", 1, learner, event.outcome)
                f.add("atoll_learner_push_bytes", event.bytes, learner)
                f.add("atoll_learner_push_seconds", event.push_ns / 1e9, learner)
            case events.LearnerFetched(learner=learner):
                f.add("atoll_learner_fetch_bytes", event.bytes, learner)
                f.add("atoll_learner_fetch_seconds", event.fetch_ns / 1e9, learner)
            case events.LearnerAdopted(learner=learner):
                f.add("atoll_learner_adoptions", 1, learner)
            case events.LearnerLink(learner=learner):
                f.set("atoll_learner_link_up", float(event.up), learner)
            case events.LearnerJoined(learner=learner):
                f.set("atoll_learner_link_up", 1.0, learner)
            case events.LearnerDiscarded(learner=learner):
                f.add("atoll_learner_discarded_tokens", event.tokens, learner, event.cause)
            case events.LearnerEvaluated(learner=learner):
                f.set("atoll_learner_published_loss", event.eval_loss, learner)
            case events.CheckpointWritten(learner=learner):
                f.add("atoll_learner_checkpoints", 1, learner)
                f.set("atoll_learner_last_checkpoint_timestamp_seconds", now_s, learner)
            case events.Warned():
                f.add("atoll_warnings", 1)
            case _:
                pass

    def _steps(self, event: events.LearnerSteps) -> None:
        f = self.families
        f.add("atoll_learner_steps", event.steps, event.learner)
        f.add("atoll_learner_tokens", event.tokens, event.learner)
        for category in SPENT:
            f.add("atoll_learner_time_seconds", getattr(event, f"{category}_ns") / 1e9, event.learner, category)
        if math.isfinite(event.loss):
            f.set("atoll_learner_loss", event.loss, event.learner)
        f.set("atoll_learner_fragments_behind", event.fragments_behind, event.learner)
