"""The clauses of the wire contract that a peer is held to, by name. `docs/reference/wire.md` lists them.

Rules of this file: data only. `section` is the heading on that page which says it at length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clause:
    name: str
    section: str
    text: str


def _clauses(rows: tuple[tuple[str, str, str], ...]) -> Mapping[str, Clause]:
    return {name: Clause(name, section, text) for name, section, text in rows}


LEARNER_CLAUSES = _clauses(
    (
        ("call.token", "Calls", "every call carries the run's token as the metadata entry atoll-token"),
        ("seal.right", "Calls", "a control message ends with the seal of its bytes, or has none"),
        ("message.valid", "Calls", "every message parses, and its fields are within their bounds"),
        ("hello.first", "Joining", "a session begins with Hello, and has no second one"),
        ("hello.new", "Joining", "the first Hello of a process names no run, generation, bases or contributions"),
        ("hello.tensors", "Joining", "after tensors_wanted it says hello again with all tensors"),
        ("hello.fingerprint", "Joining", "Hello.fingerprint is the SHA-256 of the tensors"),
        ("seed.whole", "Joining", "a seeding learner pushes every fragment whole, as fp32, with zeros as padding"),
        (
            "push.open",
            "Payloads",
            "the first part of a push has its PushOpen, and stripes do not contradict each other",
        ),
        ("push.parts", "Payloads", "parts lie at multiples of part_bytes and have their checksums"),
        ("push.checksum", "Payloads", "size and checksum in a header are those of the payload"),
        ("push.names", "Payloads", "a push or fetch names its learner, its generation and the session's secret"),
        ("push.again", "Refusals", "a push that is answered busy or checksum_mismatch is sent again"),
        ("start.first", "Joining", "it says Ready only after Start, and takes no step before its first Ready"),
        ("ready.place", "Joining", "Ready has the step of Start and the versions that were adopted"),
        ("progress.counts", "Rounds", "steps and tokens of Progress only grow, and step grows with steps"),
        ("progress.bases", "Rounds", "Progress.bases are versions that were published, and never go back"),
        ("progress.pending", "Rounds", "tokens = merged + pending + discarded, for every fragment"),
        ("request.answer", "Rounds", "a Request is answered by a contribution or by Nothing"),
        ("contribution.header", "Rounds", "a contribution has the run's codec, and at least one step and one token"),
        ("contribution.base", "Rounds", "a contribution's base_version is the version that its learner has adopted"),
        ("contribution.seq", "Rounds", "contributions of a fragment count up, and a number is never used for another"),
        ("contribution.payload", "Payloads", "a contribution decodes to finite values of the fragment's size"),
        ("adopt.inline", "Adopting", "an update inside Published is adopted at a step boundary"),
        (
            "adopt.checked",
            "Adopting",
            "an update that does not lead to the checksum is not adopted; the whole is fetched",
        ),
        ("adopt.fetched", "Adopting", "an update that is not inside Published is fetched and adopted"),
        ("fetch.damaged", "Payloads", "what came with a wrong checksum is fetched again"),
        ("refused.final", "Refusals", "a contribution that was refused is not sent again under its number"),
        (
            "refused.progress",
            "Refusals",
            "the progress of a refused contribution goes into a later one (adopt: rebase)",
        ),
        ("unknown.passed", "Calls", "a message about a fragment that the run does not have changes nothing"),
        ("seal.checked", "Calls", "a message with a wrong seal is not believed: the session starts again"),
        ("hello.again", "Coming back", "a Hello after a break has the same instance, run, generation and epoch"),
        ("hello.bases", "Coming back", "a Hello after a break has the versions held, and their checksums"),
        ("hello.outstanding", "Coming back", "a Hello after a break lists contributions whose fate is open"),
        ("outstanding.again", "Coming back", "a contribution that was not answered is sent again, the same bytes"),
        ("heal.bytes", "Coming back", "Heal is answered with exactly the published parameters"),
        ("reseed.whole", "Refusals", "after Reseed every fragment is fetched whole and overwritten"),
        ("stop.handed", "Leaving", "after Stop all that is left is handed over before Leave"),
        ("stop.leave", "Leaving", "after Stop the learner says Leave, and does not come back"),
        ("protocol.older", "Joining", "after protocol_version it says hello in the next older protocol, or ends"),
        ("protocol.fields", "Joining", "nothing newer than the protocol of the session is sent"),
        ("refused.hello", "Refusals", "a learner whose Hello is refused for good does not come back"),
        ("refused.fenced", "Refusals", "a learner that was fenced pushes nothing more and does not come back"),
    )
)

SYNCER_CLAUSES = _clauses(
    (
        ("call.token", "Calls", "a call without the token ends with UNAUTHENTICATED"),
        ("seal.right", "Calls", "a control message ends with the seal of its bytes, or has none"),
        ("message.valid", "Calls", "every message parses, and its fields are within their bounds"),
        ("status.json", "Calls", "Status answers with a JSON object"),
        ("hello.first", "Joining", "a session that does not begin with Hello is refused"),
        ("hello.damaged", "Calls", "a Hello with a wrong seal is not taken, and not refused for good"),
        ("protocol.unknown", "Joining", "a protocol that it does not know is refused with protocol_version"),
        ("protocol.older", "Joining", "a learner of an older protocol is welcomed in it, and sent nothing newer"),
        ("hello.tensors", "Joining", "where it needs the tensors it refuses with tensors_wanted"),
        ("welcome.fingerprint", "Joining", "Welcome has the fingerprint of the layout that follows from its settings"),
        ("welcome.secret", "Joining", "Welcome of protocol 3 has a secret, another one for each session"),
        ("welcome.rank", "Joining", "no two learners have the same rank"),
        ("welcome.seed", "Joining", "one learner of a new run is asked for the first parameters"),
        ("layout.other", "Joining", "a learner with another model is refused with wrong_layout"),
        ("push.size", "Payloads", "a whole fragment of the wrong size is refused with wrong_size"),
        ("push.checksum", "Payloads", "a payload with a wrong checksum is refused with checksum_mismatch"),
        ("push.part", "Payloads", "a part with a wrong checksum is refused with checksum_mismatch"),
        ("push.stranger", "Refusals", "a push in the name of nobody is refused with unknown_learner"),
        ("push.secret", "Refusals", "a push or fetch without the session's secret is refused with wrong_secret"),
        ("push.generation", "Refusals", "a push of another generation is refused with stale_generation"),
        ("start.states", "Joining", "Start follows the seed, with the checksums of the parameters that were pushed"),
        ("fetch.theta", "Payloads", "whole parameters are those that were pushed, in parts that end at 1 MiB"),
        ("fetch.range", "Payloads", "a range has exactly its bytes"),
        ("fetch.unknown", "Refusals", "what it does not have is refused: unknown_version, unknown_fragment"),
        ("contribution.early", "Refusals", "a contribution before Ready is refused with not_ready"),
        ("round.request", "Rounds", "learners that make progress are asked for a fragment that is due"),
        ("round.received", "Rounds", "a Contribution is answered by Received, with its fragment and number"),
        ("contribution.codec", "Refusals", "another codec is refused with wrong_codec"),
        ("contribution.round", "Refusals", "a round that was never launched is refused with unknown_round"),
        ("contribution.counters", "Refusals", "no steps or no tokens are refused with bad_counters"),
        ("contribution.base", "Refusals", "a base that was never published is refused with unknown_version"),
        ("contribution.size", "Refusals", "a payload of the wrong size is refused with wrong_size"),
        ("contribution.twice", "Refusals", "a number that was received is refused with duplicate"),
        ("contribution.finite", "Refusals", "values that are not finite are refused, and the learner is re-seeded"),
        ("published.all", "Rounds", "a merged round is published to everybody, one version up"),
        ("published.own", "Rounds", "merged_seq is the receiver's own contribution"),
        ("published.checksum", "Adopting", "the update leads from the version before to the checksum"),
        ("fetch.update", "Payloads", "the update can be fetched, too, with the same bytes"),
        ("back.same", "Coming back", "the same instance keeps its generation, and gets a new secret"),
        ("back.fate", "Coming back", "a contribution listed in Hello gets its Fate, or is asked for again"),
        ("back.fenced", "Coming back", "another instance gets the next generation; the old session ends with fenced"),
        ("message.bad", "Calls", "a message of an impossible kind ends its session, and no other"),
        ("data.leases", "Data", "chunks are leased to one learner at a time"),
        ("data.again", "Data", "a grant that was lost is granted again"),
        ("data.returned", "Data", "a chunk that was handed back is granted from where it was left"),
        ("leave.asked", "Leaving", "AskToLeave is passed on as Stop"),
        ("leave.over", "Leaving", "who has left is no member that can push, and its instance is not taken back"),
        (
            "heal.asked",
            "Coming back",
            "a fresh syncer takes up the run that a learner holds, and asks for its versions",
        ),
        ("heal.checked", "Coming back", "parameters that are not what was claimed are refused"),
        ("heal.start", "Coming back", "healed versions are those that Start names"),
    )
)
