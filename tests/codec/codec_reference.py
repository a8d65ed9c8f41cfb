"""Plain numpy versions of the codecs and of the merge: slow, short and obviously right."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BLOCK = 256
STEPS = {"int8": np.float32(128), "int4": np.float32(8)}


def encode(name: str, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    """The payload of x and what it decodes to."""
    if name == "lowrank":  # without shapes
        name = "int4"
    if name == "fp32":
        return x.astype("<f4").tobytes(), x.copy()
    if name == "bf16":
        with np.errstate(over="ignore"):
            rounded = x.astype(ml_dtypes.bfloat16)
        top = ml_dtypes.finfo(ml_dtypes.bfloat16).max
        rounded = np.where(np.isinf(rounded.astype(np.float32)), np.copysign(top, rounded), rounded)
        rounded = rounded.astype(ml_dtypes.bfloat16)
        return rounded.view(np.uint16).astype("<u2").tobytes(), rounded.astype(np.float32)
    if name.startswith("topk"):
        return _encode_topk(name, x)
    scales, codes, decoded = [], [], []
    for start in range(0, x.size, BLOCK):
        block = np.zeros(BLOCK, np.float32)
        part = x[start : start + BLOCK]
        block[: part.size] = part
        if name == "int2":
            scale, code, values = _encode_int2_block(block)
        else:
            scale, code = _encode_block(block, STEPS[name])
            values = code * scale
        scales.append(scale)
        codes.append(PACK[name](code))
        decoded.append(values[: part.size])
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


def _encode_int2_block(block: np.ndarray) -> tuple[np.float32, np.ndarray, np.ndarray]:
    """Scale, codes and decoded values of one block of int2."""
    nothing = np.float32(0), np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.float32)
    low, high = block.min(), block.max()
    peak = low if -low >= high else high
    if abs(peak) < 2.0**-111:
        return nothing
    power = np.float32(2.0 ** (2 - np.frexp(peak)[1]))  # brings the peak to 2 .. 4
    y = block * power
    zeros = np.count_nonzero(y == 0)
    offset = np.float32(0.0 if zeros else 0.5)
    step = np.sqrt(_folded_sum(y * y) / np.float32(BLOCK - zeros))
    step = -step if zeros and peak > 0 else step
    for _ in range(2):
        levels = _int2_codes(y, np.float32(1) / step, offset) + offset
        step = _folded_sum(y * levels) / np.float32((levels.astype(np.float64) ** 2).sum())
    with np.errstate(over="ignore"):  # only blocks near the end of fp32's range have anything to clip
        top = np.finfo(np.float32).max / np.float32(4) * power
    half = np.clip(np.float32(0.5) * step, -top, top)
    half = np.uint32((half.view(np.uint32) & 0xFFFFFFFE) | (0 if zeros else 1)).view(np.float32)
    scale = np.float32(np.ldexp(half, np.frexp(peak)[1] - 2))
    codes = _int2_codes(y, np.float32(0.5) / half, offset)
    return scale, codes, (2 * codes + np.float32(2 * offset)) * scale


def _encode_topk(name: str, x: np.ndarray) -> tuple[bytes, np.ndarray]:
    share, _, values = name.partition(":")[2].partition(":")
    kept, bits = round(float((share or "2%")[:-1]) * BLOCK / 100), 4 if values == "int4" else 2
    scales, entries, decoded = [], [], []
    for start in range(0, x.size, BLOCK):
        block = np.zeros(BLOCK, np.float32)
        part = x[start : start + BLOCK]
        block[: part.size] = part
        scale, places, codes, values_of = _encode_topk_block(block, kept, bits)
        scales.append(scale.view(np.uint32) >> 16)
        packed = sum((int(code) & (1 << bits) - 1) << bits * entry for entry, code in enumerate(codes))
        entries.append(bytes(places) + packed.to_bytes(-(-kept * bits // 8), "little"))
        decoded.append(values_of[: part.size])
    flat = np.concatenate(decoded) if decoded else np.zeros(0, np.float32)
    return np.array(scales, "<u2").tobytes() + b"".join(entries), flat


def _encode_topk_block(block: np.ndarray, kept: int, bits: int) -> tuple[np.float32, list[int], list[int], np.ndarray]:
    """Scale, places, codes and decoded values of one block of topk."""
    coarse = block.view(np.uint32) << 1 >> 8
    places = sorted(sorted(range(BLOCK), key=lambda j: (-int(coarse[j]), j))[:kept])
    low, high = block.min(), block.max()
    peak = low if -low >= high else high
    if abs(peak) < 2.0**-111:
        return np.float32(0), places, [0] * kept, np.zeros(BLOCK, np.float32)
    power = np.float32(2.0 ** (2 - np.frexp(peak)[1]))
    chosen, odd = (block * power)[places], bits == 2 and np.count_nonzero(block[places]) == kept
    with np.errstate(over="ignore"):
        top = np.finfo(np.float32).max / np.float32(4) * power
    if bits == 4:
        step = _bf16_below(-(peak * power) / np.float32(8), None)
    elif odd:
        step = _bf16_below(np.clip(_topk_step(np.abs(chosen)), -top, top), 1)
    else:
        step = _bf16_below(np.clip(-(peak * power) / np.float32(2), -top, top), 0)
    scale, quotients = np.float32(step / power), chosen * (np.float32(1) / step)
    if odd:
        levels = np.where(np.abs(quotients) > 2.5, 3, 2) * np.where(quotients >= 0, 1, -1)
        codes = [{-3: -2, -2: -1, 2: 0, 3: 1}[int(level)] for level in levels]
    else:
        limit = 1 << bits - 1
        levels = np.rint(np.clip(quotients, -limit, limit - 1))
        codes = [int(level) for level in levels]
    values = np.zeros(BLOCK, np.float32)
    values[places] = levels.astype(np.float32) * scale
    return scale, places, codes, values


def _topk_step(magnitudes: np.ndarray) -> np.float32:
    total = np.float32(0)
    for value in magnitudes:
        total = total + value
    step = total / np.float32(2.5 * magnitudes.size)
    for _ in range(2):
        products = squares = np.float32(0)
        for value in magnitudes:
            level = np.float32(3) if value > np.float32(2.5) * step else np.float32(2)
            products, squares = products + value * level, squares + level * level
        step = products / squares
    return step


def _bf16_below(value: np.float32, odd: int | None) -> np.float32:
    bits = np.float32(value).view(np.uint32)
    kept = bits & np.uint32(0xFFFF0000) if odd is None else (bits & np.uint32(0xFFFE0000)) | np.uint32(odd << 16)
    return np.uint32(kept).view(np.float32)


def _int2_codes(y: np.ndarray, inverse: np.float32, offset: np.float32) -> np.ndarray:
    return np.rint(np.clip(y * inverse - offset, np.float32(-2), np.float32(1)))


def _folded_sum(x: np.ndarray) -> np.float32:
    """Eight rows of 32 added up in order, then halves until one value is left: the order of the kernels."""
    rows = x.reshape(8, 32)
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    while total.size > 1:
        total = total[: total.size // 2] + total[total.size // 2 :]
    return np.float32(total[0])


def _pack_int4(code: np.ndarray) -> bytes:
    nibbles = code.astype(np.int8).view(np.uint8) & 15
    return (nibbles[:128] | (nibbles[128:] << 4)).astype(np.uint8).tobytes()


def _pack_int2(code: np.ndarray) -> bytes:
    parts = (code.astype(np.int8).view(np.uint8) & 3).reshape(4, 64)
    return (parts[0] | (parts[1] << 2) | (parts[2] << 4) | (parts[3] << 6)).astype(np.uint8).tobytes()


PACK = {"int8": lambda code: code.astype(np.int8).tobytes(), "int4": _pack_int4, "int2": _pack_int2}


def merged_gradient(deltas: list[np.ndarray], weights: list[float], slices: np.ndarray, modes: list[str]) -> np.ndarray:
    """The merged gradient in float64, from decoded deltas."""
    share = np.array(weights, np.float64) / np.sum(weights)
    vectors = [-delta.astype(np.float64) for delta in deltas]
    gradient = np.zeros_like(vectors[0])
    for index, mode in enumerate(modes):
        part = slice(slices[index] * BLOCK, slices[index + 1] * BLOCK)
        mean = sum(w * v[part] for w, v in zip(share, vectors, strict=True))
        if mode != "mean":
            norms = [np.linalg.norm(v[part]) for v in vectors]
            direction = sum(
                w * v[part] / norm for w, v, norm in zip(share, vectors, norms, strict=True) if norm > 0
            ) + np.zeros_like(mean)
            length = np.linalg.norm(direction)
            if length > 1e-6:
                mean = (
                    float(share @ norms)
                    * direction
                    / (length if mode == "rda" else np.sqrt(length * sum(share[np.array(norms) > 0])))
                )
        gradient[part] = mean
    return gradient


def heloco(v: np.ndarray, m: np.ndarray) -> np.ndarray:
    """One tensor of one contribution, corrected as in the paper (arXiv 2606.00271), in float64."""
    v_norm, m_norm = np.linalg.norm(v), np.linalg.norm(m)
    if v_norm == 0 or m_norm == 0:
        return v
    u, w = v / v_norm, m / m_norm
    c = float(u @ w)
    conf = v_norm / (v_norm + 3.0 * m_norm + 1e-8)
    if c >= 0.2:
        return v
    if c < 0:
        return v - min(0.5 * -c * conf, 0.5) * c * v_norm * w
    turn = min((1 - c) * conf, 1.0)
    mixed = (1 - turn) * u + turn * w
    return v_norm * mixed / np.linalg.norm(mixed)
