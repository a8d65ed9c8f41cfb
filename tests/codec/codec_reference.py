"""Plain numpy versions of the codecs and of the merge: slow, short and obviously right."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK = 256
STEPS = {"int8": np.float32(128), "int4": np.float32(8)}


def encode(name: str, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The payload of x and what it decodes to."""
    if name == "fp32":
        return x.astype("<f4").tobytes(), x.copy()
    if name == "bf16":
        with np.errstate(over="ignore"):
            rounded = x.astype(ml_dtypes.bfloat16)
        top = ml_dtypes.finfo(ml_dtypes.bfloat16).max
        rounded = np.where(np.isinf(rounded.astype(np.float32)), np.copysign(top, rounded), rounded)
        rounded = rounded.astype(ml_dtypes.bfloat16)
        return rounded.view(np.uint16).astype("<u2").tobytes(), rounded.astype(np.float32)
    scales, codes, decoded = [], [], []
    for start in range(0, x.size, BLOCK):
        block = np.zeros(BLOCK, np.float32)
        part = x[start : start + BLOCK]
        block[: part.size] = part
        scale, code = _encode_block(block, STEPS[name])
        scales.append(scale)
        codes.append(_pack(code) if name == "int4" else code.astype(np.int8).tobytes())
        decoded.append((code * scale)[: part.size])
    flat = np.concatenate(decoded) if decoded else np.zeros(0, np.float32)
    return np.array(scales, "<f4").tobytes() + b"".join(codes), flat


def _encode_block(block: np.ndarray, steps: np.float32) -> tuple[np.float32, np.ndarray]:
    low, high = block.min(), block.max()
    peak = low if -low >= high else high  # of two that tie, the negative one
    scale = np.float32(-peak / steps)
    if abs(scale) < np.finfo(np.float32).tiny:
        return np.float32(0), np.zeros(BLOCK, np.float32)
    inverse = np.float32(1) / scale
    return scale, np.rint(np.minimum(block * inverse, steps - 1)).astype(np.float32)


def _pack(code: np.ndarray) -> bytes:
    nibbles = code.astype(np.int8).view(np.uint8) & 15
    return (nibbles[:128] | (nibbles[128:] << 4)).astype(np.uint8).tobytes()


def merged_gradient(
    deltas: list[np.ndarray], weights: list[float], slices: np.ndarray, modes: np.ndarray
) -> np.ndarray:
    """The merged gradient in float64, from decoded deltas."""
    share = np.array(weights, np.float64) / np.sum(weights)
    vectors = [-delta.astype(np.float64) for delta in deltas]
    gradient = np.zeros_like(vectors[0])
    for index, mode in enumerate(modes):
        part = slice(slices[index] * BLOCK, slices[index + 1] * BLOCK)
        mean = sum(w * v[part] for w, v in zip(share, vectors, strict=True))
        if mode == 0:
            norms = [np.linalg.norm(v[part]) for v in vectors]
            direction = sum(
                w * v[part] / norm for w, v, norm in zip(share, vectors, norms, strict=True) if norm > 0
            ) + np.zeros_like(mean)
            length = np.linalg.norm(direction)
            if length > 1e-6:
                mean = float(share @ norms) * direction / length
        gradient[part] = mean
    return gradient
