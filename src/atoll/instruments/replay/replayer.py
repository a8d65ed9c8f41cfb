"""The second pass of a replay: states are taken, merges made, versions compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import xxhash

from atoll.core import NO_VERSION
from atoll.errors import PayloadError, StoreError
from atoll.instruments.replay.history import (
    About,
    Decision,
    History,
    RecordedMerge,
    RecordedState,
    about_of,
    merge_of,
    state_of,
    tape_decisions,
)
from atoll.instruments.replay.payloads import Payloads
from atoll.instruments.replay.recording_reader import Record, SegmentReader
from atoll.instruments.replay.report import FragmentEnd, Jump, Mismatch, ReplayReport, parameters_hash
from atoll.syncer import DERIVED, HERE, ZERO, FragmentArrays, ModelState


class Replayer:
    """Fills a report. A fragment is *lost* while the recording does not lead to its next version; a state that is
    recorded whole brings it back."""

    def __init__(self, history: History, report: ReplayReport) -> None:
        self._history = history
        self._report = report
        self._state: ModelState | None = None
        self._about: About | None = None
        self._lost: dict[int, str] = {}
        self._stopped: set[int] = set()
        """Fragments that have reached the round at which to stop."""
        self._rounds: dict[int, int] = {}
        self._payloads = Payloads(history)
        self._tape = TapeCheck(history)

    @property
    def state(self) -> ModelState:
        assert self._state is not None, "the first pass has found a segment"
        return self._state

    def run(self) -> None:
        epochs: set[int] = set()
        try:
            for reader in self._history.readers():
                if reader.about:
                    epochs.add(reader.segment.epoch)
                    self._enter(about_of(reader), reader)
                for record in reader.records():
                    if record.kind == "state":
                        self._take_state(state_of(record), reader)
                    elif record.kind == "merge":
                        self._merge(merge_of(record))
                    if self._report.mismatch is not None:
                        return
            self._finish()
        finally:
            self._report.epochs = len(epochs)
            self._payloads.close()

    def _enter(self, about: About, reader: SegmentReader) -> None:
        """A segment begins. Settings may have changed with a restart: what follows is what production does then."""
        if self._about is not None and about.layout.fingerprint != self._about.layout.fingerprint:
            raise StoreError(
                f"{reader.segment.path} has another layout than the segments before it, so it is not of this run; put "
                "the right file back"
            )
        if self._about is not None and about.config == self._about.config:
            return
        before = enumerate(self._state.fragments if self._state is not None else ())
        stored = {index: (arrays.version, arrays.checksum, arrays.named()) for index, arrays in before}
        # One update per fragment is kept instead of eight: nobody asks for them here.
        self._state = ModelState(about.layout, replace(about.config, ring_versions=1))
        self._state.restore(stored)
        self._about = about

    def _fragment(self, index: int, record: Record) -> FragmentArrays:
        if not 0 <= index < len(self.state.fragments):
            raise StoreError(f"{record.where}: this run has no fragment {index}; the file is foreign. Remove it")
        return self.state.fragments[index]

    def _beyond(self, round_number: int) -> bool:
        return self._report.until is not None and round_number > self._report.until

    def _differs(self, told: RecordedState | Decision, found: int, what: str) -> None:
        self._report.mismatch = Mismatch(told.fragment, told.version, told.round, told.checksum, found, what)

    # ------------------------------------------------------------ states

    def _take_state(self, told: RecordedState, reader: SegmentReader) -> None:
        index, epoch = told.fragment, told.record.segment.epoch
        arrays = self._fragment(index, told.record)
        if index in self._stopped or not self._history.counts(epoch, index, told.version):
            return
        if self._beyond(told.round):
            self._stopped.add(index)
            return
        followed = arrays.version != NO_VERSION and index not in self._lost
        digests = {name: checksum for name, (checksum, _) in told.arrays.items()}
        if followed and arrays.version == told.version and _digests(arrays) == digests:
            return  # as it should be: what was recorded leads here
        if any(how == DERIVED for _, how in told.arrays.values()):
            cause = self._lost.get(index, "the records that lead there are missing")
            self._lost[index] = (
                f"fragment {index}: epoch {epoch} went on from a state at version {told.version} that the recording "
                f"does not lead to ({cause})"
            )
            return
        before = arrays.version
        self._load(told, arrays, reader)
        self._lost.pop(index, None)
        if before != NO_VERSION or told.version > 0:
            self._report.jumps.append(Jump(index, before, told.version, told.why))

    def _load(self, told: RecordedState, arrays: FragmentArrays, reader: SegmentReader) -> None:
        """Take a state as it was recorded, straight into the model."""
        offset = 0
        named = arrays.named()
        if told.arrays.keys() != named.keys():
            raise StoreError(
                f"{told.record.where}: the state holds {', '.join(sorted(told.arrays))}, and with these settings it "
                f"has {', '.join(sorted(named))}; the file is damaged. Put a good copy of it back"
            )
        for name, array in named.items():
            checksum, how = told.arrays[name]
            try:
                if how == HERE:
                    reader.read_body(told.record, offset, array, checksum)
                    offset += array.nbytes
                elif how == ZERO:
                    array[:] = 0.0
                else:
                    raise PayloadError(f"it is recorded as {how!r}")
            except (PayloadError, OSError) as error:
                raise StoreError(
                    f"{told.record.where}: {name} of fragment {told.fragment} at version {told.version} ({told.why}) "
                    f"is damaged: {error}. Put a good copy of that file back"
                ) from error
        arrays.version, arrays.checksum, arrays.sample = told.version, told.checksum, None
        found = xxhash.xxh3_64_intdigest(arrays.theta.data)
        if found != told.checksum:
            self._differs(told, found, "the state")

    # ------------------------------------------------------------ merges

    def _merge(self, recorded: RecordedMerge) -> None:
        decision = recorded.decision
        index, version = decision.fragment, decision.version
        arrays = self._fragment(index, recorded.record)
        self._tape.compare(decision)
        if not self._history.counts(*decision.key):
            self._report.left_out += 1
            return
        if self._beyond(decision.round):
            self._stopped.add(index)
        if index in self._stopped or index in self._lost:
            return
        if arrays.version == NO_VERSION or version > arrays.version + 1:
            first = arrays.version + 1
            what = f"version {first} is" if version == first + 1 else f"versions {first} to {version - 1} are"
            self._lost[index] = f"fragment {index}: {what} not in the recording (before {recorded.record.where})"
            return
        if version <= arrays.version:
            raise StoreError(
                f"{recorded.record.where}: version {version} of fragment {index} was decided twice; the file is a copy "
                "of another one or foreign. Put the right files back"
            )
        held = self._payloads.of(recorded, self.state)
        try:
            result = self.state.merge(index, held, decision.weights, codec_down=decision.codec_down)
        except PayloadError as error:
            raise StoreError(
                f"{recorded.record.where}: version {version} of fragment {index} cannot be merged ({error}); the file "
                "is damaged. Put a good copy of it back"
            ) from error
        self._rounds[index] = decision.round
        self._report.merges += 1
        self._report.contributions += len(held)
        self._report.payload_bytes += sum(item.payload.nbytes for item in held)
        self._report.round_last = max(self._report.round_last, decision.round)
        if not result.finite or arrays.checksum != decision.checksum:
            self._differs(decision, arrays.checksum, "the merge")

    # ------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Compare where the fragments ended with what the run has on its disk."""
        report = self._report
        for index, arrays in enumerate(self.state.fragments):
            version, checksum = self._history.finals.get(index, (NO_VERSION, 0))
            report.ends.append(FragmentEnd(index, version, checksum, arrays.version, arrays.checksum))
            if index in self._lost:
                report.missing.append(f"{self._lost[index]}; it was followed to version {arrays.version} of {version}")
            elif version == NO_VERSION:
                report.problems.append(f"fragment {index}: no good copy is on the run's disk to compare with")
            elif index in self._stopped or (arrays.version, arrays.checksum) == (version, checksum):
                continue
            elif arrays.version < version:
                report.missing.append(
                    f"fragment {index}: versions {arrays.version + 1} to {version} were committed and are not in the "
                    f"recording{self._history.unrecorded.get(index, '')}"
                )
            elif index in self._history.unrecorded:
                report.missing.append(
                    f"fragment {index}: version {version} on the disk is not the recorded one"
                    f"{self._history.unrecorded[index]}"
                )
            elif report.mismatch is None:
                last = self._rounds.get(index, 0)
                report.mismatch = Mismatch(index, version, last, checksum, arrays.checksum, "the state on disk")
        report.hash_found = parameters_hash([end.found_checksum for end in report.ends])
        if not self._stopped and all(end.version != NO_VERSION for end in report.ends):
            report.hash_expected = parameters_hash([end.checksum for end in report.ends])


class TapeCheck:
    """The tape knows most decisions, too (all but those of the last second before a crash). They must be the same.

    Both are read in step: what is ahead on the tape is remembered until the recording comes to it."""

    def __init__(self, history: History) -> None:
        self._notes: Iterator[Decision] = tape_decisions(history.state, history.problems)
        self._ahead: dict[tuple[int, int, int], Decision] = {}
        self._next: Decision | None = next(self._notes, None)

    def compare(self, decision: Decision) -> None:
        """StoreError if the tape says something else about this version."""
        while decision.key not in self._ahead and self._next is not None and self._next.epoch <= decision.epoch:
            if self._next.epoch == decision.epoch:
                self._ahead[self._next.key] = self._next
            self._next = next(self._notes, None)
        noted = self._ahead.pop(decision.key, None)
        if noted is not None and noted != decision:
            raise StoreError(
                f"the tape and the recording do not belong together: of version {decision.version} of fragment "
                f"{decision.fragment} (epoch {decision.epoch}) the tape says {noted.content}, the recording "
                f"{decision.content}. Put the files of one run together"
            )


def _digests(arrays: FragmentArrays) -> dict[str, int]:
    return {name: xxhash.xxh3_64_intdigest(array.data) for name, array in arrays.named().items()}
