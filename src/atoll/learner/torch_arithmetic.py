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
from atoll.learner.torch_codec import BLOCK, Encoded, Tensor
from atoll.learner.torch_sparse import device_codec, kept_and_bits

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
        and all(device_codec(get_codec(name)) is not None for name in (config.codec_up, config.codec_down))
        and parameters * BYTES_PER_PARAMETER <= DEVICE_SHARE_MAX * torch.cuda.get_device_properties(device).total_memory
    )


@cache
def _triton() -> tuple[ModuleType | None, ModuleType | None]:
    """Kernels of the codecs that send every value (and of rebase), and those of topk."""
    try:
        from atoll.learner import triton_codec, triton_topk
    except ImportError:
        return None, None
    return triton_codec, triton_topk


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
        n, here = theta.numel(), device_codec(named)
        if here is None:
            values = self.on_host(theta).copy()
            named.decode_add(payload, values)
            return self.loaded(values.view(np.uint8))
        if payload.nbytes != here.size(n):
            size = here.size(n)
            raise PayloadError(f"{named.name} payload of {payload.nbytes} bytes, expected {size} for {n} elements")
        if kept_and_bits(named)[0]:
            named.inspect(payload, n, np.array([0, -(-n // BLOCK)], np.int64))  # its places must ascend
        with self.beside():
            return self.add(theta, named, self._to_device(payload))

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
        triton = _triton()[0] if self._stream is not None and len(moves) == 1 and out is None else None
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
        if device_codec(named) is None:
            return self._encoded_on_host(named, values, origin, residual, feedback)
        feedback = feedback and not named.lossless
        with self.beside():
            made = self._encode(named, values, origin, residual if feedback else None, feedback)
            payload, finite = self._to_host(made.payload), self._to_host(made.finite)
            done = self.done()
        if done is not None:
            done.synchronize()
        if not bool(finite):
            raise not_finite(named.name)
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

    def _kernels(self, codec: Codec) -> tuple[ModuleType, tuple[int, ...]] | None:
        """Who computes this codec in one pass, and how it is told to them; None: torch does, or there is no GPU."""
        dense, sparse = _triton() if self._stream is not None else (None, None)
        if dense is not None and codec.name in STEPS:
            return dense, (STEPS[codec.name],)
        kept, bits = kept_and_bits(codec)
        return (sparse, (kept, bits)) if sparse is not None and kept else None

    def add(self, theta: Tensor, codec: Codec, payload: Tensor) -> Tensor:
        """theta + decode(payload), on the current stream."""
        found = self._kernels(codec)
        if found is not None:
            added: Tensor = found[0].add_update(theta, payload, *found[1])
            return added
        here = device_codec(codec)
        assert here is not None
        return theta + here.decode(payload, theta.numel())

    def _encode(self, codec: Codec, values: Tensor, origin: Tensor, residual: Tensor | None, feedback: bool) -> Encoded:
        found = self._kernels(codec)
        if found is not None:
            made: Encoded = found[0].encode_difference(values, origin, residual, *found[1], feedback)
            return made
        x, here = values - origin, device_codec(codec)
        assert here is not None
        return here.encode(x if residual is None else x + residual)

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
