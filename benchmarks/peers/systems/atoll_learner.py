"""Atoll, in the project's own environment. The syncer is a command: `atoll syncer --listen HOST:PORT --learners 4`."""

from workload import Workload

import atoll

work = Workload.from_arguments()
name = f"worker-{work.options.rank}"
place = {"address": work.options.coordinator, "learner_id": name, "run_folder": work.options.folder / "run"}
with atoll.Learner(work.model, work.optimizer, **place) as learner:
    for step in work.steps(learner.step_count):
        loss = work.forward()
        loss.backward()
        work.optimizer.step()
        learner.step(tokens=work.tokens)
        work.record(step, loss.item())
        if learner.done:
            break
learner.adopt_published()
work.finish()
