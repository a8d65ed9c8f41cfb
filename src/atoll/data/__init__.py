"""Data that is shared out among learners which come, go and fail: `atoll.data`.

    with atoll.Learner(model, optimizer) as learner:
        loader = atoll.data.loader(learner, dataset, batch_size=32, epochs=3, seed=0, num_workers=2)
        for batch in loader:
            ...; optimizer.step(); learner.step(tokens=...)

loader      a map-style data set: len(dataset), dataset[index]
stream      anything that can be opened by number: files, shards, ranges
iterable    a data set that can only be read from its beginning
chunks      the leased numbers alone, for a loop that reads for itself
place       (epoch, index) of a chunk number, in a seeded shuffled order

A stream of data is cut into numbered chunks; the syncer leases chunks to learners and keeps the ledger, through
restarts of its own. A loop that samples for itself needs none of this: it simply does not use atoll.data.

What is promised
  1. A chunk is leased to one learner at a time, and a finished chunk is never issued again.
  2. A lost learner's unfinished chunks are issued again. That repeats at most those: samples of them which the lost
     learner had processed may have been merged already.
  3. A learner that leaves cleanly (the end of `with`, SIGTERM) hands back the rest of each chunk, exact to the sample:
     nothing is repeated and nothing left out.
  4. A chunk is done when the optimizer step of its last sample is over (`learner.step`). Samples in a DataLoader
     worker, or in a batch whose step did not happen, are never counted as processed. The syncer is told at once, or
     within a second where chunks are shorter than that; until then a chunk counts as unfinished.
  5. So, with adopt=rebase, the tokens of a finished chunk enter merged progress at most once, with one exception: a
     learner that is cut off for longer than the run's lost_after goes on training on what it has; chunks that it
     finished meanwhile may have been issued to another. The ledger counts them as `repeated`.
  6. The same seed gives the same chunk the same samples in the same order on every learner.

What it does not do: wait. Leases are taken ahead, for `ahead_s` (five minutes) of training at the measured pace, so a
link that is down for less changes nothing. If they do run out, when_dry="repeat" goes over the last chunks again, with
a warning and a count; when_dry="wait" waits. Only the first lease is waited for. Of data that ends, nobody takes more
than an eighth of what is left ahead, and near the end all hand back what they have not begun, so that they finish
together: a link that breaks there is felt sooner. A learner that finds nothing left stays for two chunks' time, then
its loop ends; chunks of one that is lost after that wait for it, or for anybody, to come back.

Batches go across chunk borders and have `batch_size` samples, but for the very last one of a learner, or of each of
its workers where those read whole chunks (drop_last gives that one up). The last chunk of an epoch may be short.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
