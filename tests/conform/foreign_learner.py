"""A learner of another maker: it speaks the contract through the generated stubs, without Atoll's own learner.

    python foreign_learner.py [FLAW]

It trains nothing: a step adds a little noise. What it shares with Atoll are the layout and the codecs, which
docs/reference/wire.md describes. A FLAW makes it break one clause on purpose, so that the kit can be tested.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from typing import Any

import grpc
import numpy as np
import xxhash

from atoll.codec import get_codec
from atoll.core import TensorSpec, build_layout
from atoll.wire.generated import atoll_pb2 as pb

FLAW = sys.argv[1] if len(sys.argv) > 1 else ""
TENSORS = (TensorSpec("embedding", (32, 64), "float32", "mean"), TensorSpec("head", (300,), "float32"))
TOKENS = 16
FINAL = {"wrong_layout", "fenced", "protocol_version", "wrong_token", "run_closed"}
METADATA = (("atoll-token", os.environ.get("ATOLL_TOKEN", "")),)


def checksum(data: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


def sealed(message: Any) -> bytes:
    data = message.SerializeToString()
    seal = checksum(data) ^ (1 if FLAW == "wrong-seal" else 0)
    return data + b"\xc1\x3e" + seal.to_bytes(8, "little")


def unsealed(data: bytes) -> bytes:
    if data[-10:-8] == b"\xc1\x3e" and FLAW != "believes-damage":
        if checksum(data[:-10]) != int.from_bytes(data[-8:], "little"):
            raise ConnectionError("a message was damaged")
        return data[:-10]
    return data


class Broken(Exception):
    """The session is over, and another one may be better."""


class Learner:
    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.instance = os.urandom(8).hex()
        self.run, self.generation, self.epoch, self.secret = "", 0, 0, ""
        self.theta: list[np.ndarray] = []
        self.base: list[np.ndarray] = []
        self.versions: list[int] = []
        self.step = self.steps = 0
        self.pending: list[int] = []
        """Tokens since the last contribution that is merged or on its way, per fragment."""
        self.since: list[int] = []
        """Steps, likewise."""
        self.discarded: list[int] = []
        self.seqs: list[int] = []
        self.out: dict[int, tuple[Any, bytes]] = {}
        """Of each fragment, the contribution whose fate is open."""
        self.refused: set[tuple[int, int]] = set()
        self.stopped = False

    # ------------------------------------------------------------ a session

    def session(self) -> bool:
        """One session; False when there is nothing to come back for."""
        self.channel = grpc.insecure_channel(os.environ["ATOLL_SYNCER"])
        self.outgoing: queue.Queue[bytes | None] = queue.Queue()
        self.incoming: queue.Queue[Any] = queue.Queue()
        call = self.channel.stream_stream("/atoll.v1.Control/Session")(iter(self.outgoing.get, None), metadata=METADATA)
        threading.Thread(target=self._listen, args=(call,), daemon=True).start()
        self.started = False
        try:
            self.say(hello=self._hello())
            while True:
                more = self._turn()
                if more is not None:
                    return more
        except (Broken, ConnectionError, grpc.RpcError):
            return True
        finally:
            self.outgoing.put(None)
            call.cancel()
            self.channel.close()

    def _listen(self, call: Any) -> None:
        try:
            for data in call:
                self.incoming.put(pb.SyncerMessage.FromString(unsealed(data)))
        except (grpc.RpcError, ConnectionError) as error:
            self.incoming.put(error)
        self.incoming.put(Broken())

    def _turn(self) -> bool | None:
        """What came, then a step."""
        while True:
            try:
                message = self.incoming.get(timeout=0.01 if self.started else 5.0)
            except queue.Empty:
                break
            if isinstance(message, Exception):
                raise Broken
            kind = message.WhichOneof("message")
            if kind == "refused":
                return message.refused.code not in FINAL
            getattr(self, f"_{kind}", lambda _: None)(getattr(message, kind))
            if self.stopped:
                return self._go()
        if self.started:
            self._train()
        return None

    def say(self, **message: Any) -> None:
        self.outgoing.put(sealed(pb.LearnerMessage(**message)))

    def _hello(self) -> Any:
        rows = [[t.name, list(t.shape), t.dtype, t.merge] for t in TENSORS]
        document = json.dumps(rows, separators=(",", ":")).encode()
        return pb.Hello(
            learner=os.environ.get("ATOLL_LEARNER", "foreign"),
            instance=self.instance,
            protocol=3,
            tensors=[pb.TensorSpec(name=t.name, shape=t.shape, dtype=t.dtype, merge=t.merge) for t in TENSORS],
            generation=self.generation,
            run=self.run,
            bases=self.versions,
            outstanding=[pb.Outstanding(fragment=f, seq=header.seq) for f, (header, _) in self.out.items()],
            epoch=self.epoch,
            checksums=[checksum(values.tobytes()) for values in self.base],
            fingerprint=hashlib.sha256(document).hexdigest(),
        )

    def _train(self) -> None:
        for fragment, values in enumerate(self.theta):
            values += self.mask[fragment] * self.random.normal(0, 1e-3, values.size).astype(np.float32)
            self.pending[fragment] += TOKENS
            self.since[fragment] += 1
        self.step, self.steps = self.step + 1, self.steps + 1
        self._report()

    def _report(self) -> None:
        held = [self.pending[f] + (self.out[f][0].tokens if f in self.out else 0) for f in range(len(self.pending))]
        causes = [pb.DiscardCount(fragment=f, cause="quarantined", tokens=n) for f, n in enumerate(self.discarded) if n]
        self.say(
            progress=pb.Progress(
                step=self.step,
                steps=self.steps,
                tokens=self.steps * TOKENS,
                step_ns=10**7,
                loss=1.0,
                bases=self.versions,
                discarded=causes,
                pending=held,
            )
        )

    # ------------------------------------------------------------ what the syncer says

    def _welcome(self, welcome: Any) -> None:
        self.run, self.generation, self.secret = welcome.run, welcome.generation, welcome.secret
        self.epoch = max(self.epoch, welcome.epoch)
        config = json.loads(welcome.config_json)
        self.codec_up, self.codec_down = get_codec(config["codec_up"]), get_codec(config["codec_down"])
        self.layout = build_layout(TENSORS, config["fragments"])
        assert self.layout.fingerprint == welcome.fingerprint
        if not self.theta:
            sizes = [fragment.size for fragment in self.layout.fragments]
            self.mask = [np.zeros(size, np.float32) for size in sizes]
            for fragment, mask in zip(self.layout.fragments, self.mask, strict=True):
                for piece in fragment.slices:
                    mask[piece.offset : piece.offset + piece.size] = 1.0
            draw = [self.random.normal(0, 0.02, size).astype(np.float32) for size in sizes]
            self.theta = [values * mask for values, mask in zip(draw, self.mask, strict=True)]
            self.pending, self.since, self.seqs, self.discarded = ([0] * len(sizes) for _ in range(4))
        if welcome.seed:
            for fragment, values in enumerate(self.theta):
                header = self._header(pb.PUSH_SEED, fragment, codec="fp32", base_version=-1)
                self._push(header, values.tobytes())

    def _start(self, start: Any) -> None:
        for fragment, state in enumerate(start.fragments):
            if len(self.base) <= fragment:
                data = self._fetch(pb.FETCH_THETA, fragment, state.version)
                assert checksum(data) == state.checksum
                self.base.append(np.frombuffer(data, np.float32).copy())
                self.versions.append(state.version)
                self.theta[fragment] = self.base[fragment].copy()
        if not self.started and not self.steps:
            self.step = start.step
        self.started = True
        self.say(ready=pb.Ready(step=self.step, bases=self.versions))
        self._report()
        for fragment in list(self.out):
            self._send(fragment)

    def _request(self, request: Any) -> None:
        fragment = request.fragment
        if fragment >= len(self.theta):
            return
        if not self.since[fragment] or fragment in self.out:
            self.say(nothing=pb.Nothing(round=request.round, fragment=fragment))
        else:
            self._contribute(fragment, request.round, request.attempt)

    def _contribute(self, fragment: int, round_number: int = 0, attempt: int = 0) -> None:
        payload = self.codec_up.encode_delta(self.theta[fragment], self.base[fragment], None, feedback=False)[0]
        base = self.versions[fragment] + (7 if FLAW == "wrong-base" else 0)
        header = self._header(pb.PUSH_CONTRIBUTION, fragment, codec=self.codec_up.name, base_version=base)
        header.round, header.attempt, header.seq = round_number, attempt, self.seqs[fragment]
        header.steps, header.tokens = self.since[fragment], self.pending[fragment]
        self.seqs[fragment] += 1
        self.pending[fragment] = self.since[fragment] = 0
        self.given = {**getattr(self, "given", {}), fragment: self.theta[fragment].copy()}
        self.out[fragment] = (header, payload.tobytes())
        self._send(fragment)

    def _send(self, fragment: int) -> None:
        header, payload = self.out[fragment]
        header.size, header.checksum = len(payload), checksum(payload) ^ (1 if FLAW == "wrong-checksum" else 0)
        self.say(contribution=pb.Contribution(header=header, payload=payload))

    def _received(self, received: Any) -> None:
        fragment = received.fragment
        if fragment not in self.out or received.reply.accepted or received.reply.code == "duplicate":
            return
        header, _ = self.out[fragment]
        if FLAW == "ignores-refusal" and (fragment, header.seq) not in self.refused:
            self.refused.add((fragment, header.seq))
            self._send(fragment)
            return
        del self.out[fragment]
        self.pending[fragment] += header.tokens
        self.since[fragment] += header.steps

    def _published(self, published: Any) -> None:
        fragment = published.fragment
        if fragment >= len(self.theta):
            return
        whole = self.base[fragment].copy()
        update = published.update or self._fetch(pb.FETCH_UPDATE, fragment, published.version)
        self.codec_down.decode_add(update, whole)
        if checksum(whole.tobytes()) != published.checksum and FLAW != "adopts-anything":
            whole = np.frombuffer(self._fetch(pb.FETCH_THETA, fragment, published.version), np.float32).copy()
        inside = self.base[fragment]
        if fragment in self.out and self.out[fragment][0].seq <= published.merged_seq:
            del self.out[fragment]
            inside = self.given[fragment]
        self.theta[fragment] += whole - inside
        self.base[fragment], self.versions[fragment] = whole, published.version
        self._report()

    def _reseed(self, _reseed: Any) -> None:
        for fragment in range(len(self.theta)):
            self.base[fragment] = np.frombuffer(self._fetch(pb.FETCH_THETA, fragment, -1), np.float32).copy()
            self.theta[fragment] = self.base[fragment].copy()
            if fragment in self.out:
                self.pending[fragment] += self.out.pop(fragment)[0].tokens
            self.discarded[fragment] += self.pending[fragment]
            self.pending[fragment] = self.since[fragment] = 0

    def _heal(self, heal: Any) -> None:
        for fragment in heal.fragments:
            header = self._header(pb.PUSH_HEAL, fragment, codec="fp32", base_version=self.versions[fragment])
            self._push(header, self.base[fragment].tobytes())

    def _stop(self, _stop: Any) -> None:
        self.stopped = True

    def _go(self) -> bool:
        """Hand over what is left, and leave."""
        for fragment in range(len(self.theta)):
            if self.pending[fragment] and fragment not in self.out and FLAW != "leaves-with-it":
                self._contribute(fragment)
        self._report()
        self.say(leave=pb.Leave(reason="told to stop"))
        time.sleep(1.0)
        return FLAW == "comes-back"

    # ------------------------------------------------------------ bulk

    def _header(self, kind: int, fragment: int, **fields: Any) -> Any:
        own = {"learner": os.environ.get("ATOLL_LEARNER", "foreign"), "generation": self.generation}
        secret = "" if FLAW == "no-secret" else self.secret
        return pb.PushHeader(kind=kind, fragment=fragment, secret=secret, **own, **fields)

    def _push(self, header: Any, payload: bytes) -> None:
        """One stream, in parts of 64 KiB, again while the syncer is busy."""
        header.size, header.checksum = len(payload), checksum(payload)
        while True:
            opened = pb.PushOpen(
                header=header, attempt_id=int.from_bytes(os.urandom(8), "little"), stripes=1, part_bytes=65536
            )
            parts = []
            for offset in range(0, max(1, len(payload)), 65536):
                data, opening = payload[offset : offset + 65536], b"" if offset else opened.SerializeToString()
                part = pb.PushPart(offset=offset, data=data, checksum=checksum(opening + data))
                if not offset:
                    part.open.CopyFrom(opened)
                parts.append(part.SerializeToString())
            reply = pb.PushReply.FromString(
                unsealed(self.channel.stream_unary("/atoll.v1.Bulk/Push")(iter(parts), metadata=METADATA))
            )
            if reply.code not in ("busy", "checksum_mismatch"):
                return
            time.sleep(0.1)

    def _fetch(self, kind: int, fragment: int, version: int) -> bytes:
        request = pb.FetchRequest(
            kind=kind,
            fragment=fragment,
            version=version,
            secret=self.secret,
            learner=os.environ.get("ATOLL_LEARNER", "foreign"),
            generation=self.generation,
        )
        while True:
            content, right = b"", True
            for data in self.channel.unary_stream("/atoll.v1.Bulk/Fetch")(sealed(request), metadata=METADATA):
                part = pb.FetchPart.FromString(data)
                if part.HasField("refused"):
                    raise Broken
                opening = part.header.SerializeToString() if part.HasField("header") else b""
                right = right and checksum(opening + part.data) == part.checksum
                content += part.data
            if right:
                return content


if __name__ == "__main__":
    learner = Learner()
    while learner.session():
        time.sleep(0.2)
