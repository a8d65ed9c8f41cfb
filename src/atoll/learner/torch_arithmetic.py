"""A learner's copies of its fragments on the device where its parameters are (`arithmetic.Arithmetic`).

Published parameters, residuals and snapshots stay on the GPU, and so does the arithmetic: only encoded bytes cross the
bus. It takes 8 bytes of device memory per parameter, and some more for what is under way. Everything runs on a stream
of its own beside training, in the order in which it was asked for.

A version's checksum is of bytes that are not on the host here. Its update was checked when it came, and what it was
added to was checked before, so most versions are taken to be what they must be. Every 16th is brought to the host and
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash

from atoll.codec import Codec, get_codec, not_finite
from atoll.core import SyncConfig
from atoll.errors import PayloadError
from atoll.learner.arithmetic import U8
from atoll.learner.parameters import F32
from atoll.learner.torch_codec import DEVICE_CODECS, Encoded, Tensor

CHECK_EVERY = 16
"""Versions of a fragment of which one is compared with the syncer's, byte for byte: at H = 8 every 128 steps."""
DEVICE_SHARE_MAX = 0.1
"""Of the device's memory, what may be taken without being asked for. The optimizer has not taken its own yet."""
BYTES_PER_PARAMETER = 12
"""8 for theta and residual, 4 for a few fragments under way."""
STEPS = {"int4": 8, "int8": 128}
"""Codecs that Triton's kernels know, by their levels below zero."""
ThingT = TypeVar("ThingT")


def fits(config: SyncConfig, device: torch.device, parameters: int) -> bool:
    """True if copies of so many parameters may live on this device in a run of these settings."""
    return (
        device.type == "cuda"
        and config.codec_up in DEVICE_CODECS
        and config.codec_down in DEVICE_CODECS
        and parameters * BYTES_PER_PARAMETER <= DEVICE_SHARE_MAX * torch.cuda.get_device_properties(device).total_memory
    )


@cache
def _triton() -> ModuleType | None:
    try:
        from atoll.learner import triton_codec
    except ImportError:
        return None
    return triton_codec


class TorchArithmetic:
    def __init__(self, device: torch.device, dtypes: Sequence[Sequence[tuple[int, int, torch.dtype]]]) -> None:
        """`dtypes` says of each fragment which ranges of it (offset, size) are kept as something else than fp32."""
        self._device = device
        self._dtypes = dtypes
        self._stream: Any = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def beside(self) -> Iterator[None]:
        """On the stream of this arithmetic, without gradients."""
        with torch.no_grad(), torch.cuda.stream(self._stream):
            yield

    def ordered(self, tensor: Tensor, ready: Any) -> Tensor:
        """A tensor of another stream, for use on this one once `ready` has happened."""
        if self._stream is not None:
            self._stream.wait_event(ready)
            tensor.record_stream(self._stream)
        return tensor

    def done(self) -> Any:
        """An event behind everything that was asked for so far; None where there are no streams."""
        if self._stream is None:
            return None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    # ------------------------------------------------------------ Arithmetic

    def loaded(self, payload: U8) -> Tensor:
        with self.beside():
            return self._to_device(payload).view(torch.float32)

    def updated(self, theta: Tensor, codec: str | Codec, payload: U8) -> Tensor:
        named = get_codec(codec)
        if named.name not in DEVICE_CODECS:
            values = self.on_host(theta).copy()
            named.decode_add(payload, values)
            return self.loaded(values.view(np.uint8))
        codec = named.name
        n, here = theta.numel(), DEVICE_CODECS[codec]
        if payload.nbytes != here.size(n):
            raise PayloadError(f"{codec} payload of {payload.nbytes} bytes, expected {here.size(n)} for {n} elements")
        with self.beside():
            return self.add(theta, codec, self._to_device(payload))

    def checksum(self, theta: Tensor, version: int, expected: int) -> int:
        if expected and version % CHECK_EVERY:
            return expected
        return xxhash.xxh3_64_intdigest(self.on_host(theta).data)

    def kept(self, fragment: int, theta: Tensor) -> Tensor:
        if not self._dtypes[fragment]:
            return theta
        with self.beside():
            rounded = theta.clone()
            for offset, size, dtype in self._dtypes[fragment]:
                piece = rounded[offset : offset + size]
                piece.copy_(piece.to(dtype))
            return rounded

    def moved(self, origin: Tensor, after: Tensor, before: Tensor) -> Tensor:
        with self.beside():
            return origin + (after - before)

    def rebased(
        self, new: Tensor, old: Tensor, moves: Sequence[tuple[Tensor, Tensor]], out: Tensor | None = None
    ) -> Tensor:
        triton = _triton() if self._stream is not None and len(moves) == 1 and out is None else None
        with self.beside():
            if triton is not None:
                made: Tensor = triton.rebase(new, old, *moves[0])
                return made
            increment = torch.sub(new, old, out=out)
            for after, before in moves:
                increment -= after - before
            return increment

    def encoded(
        self, codec: str | Codec, values: Tensor, origin: Tensor, residual: Tensor | None, *, feedback: bool
    ) -> tuple[U8, Tensor | None]:
        named = get_codec(codec)
        if named.name not in DEVICE_CODECS:
            return self._encoded_on_host(named, values, origin, residual, feedback)
        codec, feedback = named.name, feedback and not named.lossless
        with self.beside():
            made = self._encode(codec, values, origin, residual if feedback else None, feedback)
            payload, finite = self._to_host(made.payload), self._to_host(made.finite)
            done = self.done()
        if done is not None:
            done.synchronize()
        if not bool(finite):
            raise not_finite(codec)
        return payload.numpy(), made.residual if feedback else None

    def on_host(self, array: Tensor) -> F32:
        with self.beside():
            host = self._to_host(array)
            done = self.done()
        if done is not None:
            done.synchronize()
        values: F32 = host.numpy()
        return values

    # ------------------------------------------------------------ inside

    def add(self, theta: Tensor, codec: str, payload: Tensor) -> Tensor:
        """theta + decode(payload), on the current stream."""
        triton = _triton() if self._stream is not None and codec in STEPS else None
        if triton is not None:
            added: Tensor = triton.add_update(theta, payload, STEPS[codec])
            return added
        return theta + DEVICE_CODECS[codec].decode(payload, theta.numel())

    def _encode(self, codec: str, values: Tensor, origin: Tensor, residual: Tensor | None, feedback: bool) -> Encoded:
        triton = _triton() if self._stream is not None and codec in STEPS else None
        if triton is not None:
            made: Encoded = triton.encode_difference(values, origin, residual, STEPS[codec], feedback)
            return made
        x = values - origin
        return DEVICE_CODECS[codec].encode(x if residual is None else x + residual)

    def _encoded_on_host(
        self, codec: Codec, values: Tensor, origin: Tensor, residual: Tensor | None, feedback: bool
    ) -> tuple[U8, Tensor | None]:
        """One contribution in a codec that the device does not compute: the syncer may ask for any."""
        before = None if residual is None else self.on_host(residual)
        payload, rest = codec.encode_delta(self.on_host(values), self.on_host(origin), before, feedback=feedback)
        return payload, None if rest is None else self.loaded(rest.view(np.uint8))

    def _to_device(self, payload: U8) -> Tensor:
        data = np.frombuffer(payload, np.uint8)
        if self._stream is None:
            return torch.from_numpy(data.copy())  # float32 wants a multiple of 4, and network buffers start anywhere
        host = torch.empty(data.size, dtype=torch.uint8, pin_memory=True)
        host.numpy()[:] = data
        return host.to(self._device, non_blocking=True)

    def _to_host(self, tensor: Tensor) -> Tensor:
        if self._stream is None:
            return tensor
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
