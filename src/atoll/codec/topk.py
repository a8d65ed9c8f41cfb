"""topk: of each block only the values of largest magnitude, with 2 or 4 bits each.

    topk            as topk:2%
    topk:2%         2% of each block (5 values of 256) with 2 bits each: 0.28 bits per parameter
    topk:3%:int4    3% with 4 bits each: 0.44 bits per parameter

    2 blocks bytes      the scales, one bfloat16 per block; blocks = ceil(n / 256)
    then, per block     k indices, one byte each, ascending; then k codes in two's complement, from the lowest bits of a
                        byte up

k = round(256 * share), at least 1. The rate is fixed, so that a payload can be cut by blocks; an index of eight bits in
a block of 256 costs 8% more than the best code for such places could. Choosing within blocks, not within a tensor,
sends something of every row; what it leaves out is sent later, by error feedback.

int4: value = float32(code) * scale, codes -8 .. 7. int2: with an odd scale (lowest of its 16 bits) the codes -2, -1, 0,
1 stand for -3, -2, 2, 3 scales: the largest values of a block are all large. With an even one they stand for
themselves: the encoder takes that for blocks with fewer than k values that are not zero, so that a zero stays one. The
scale is fitted by least squares. A block whose largest value is below 2**-111 is zero. Decoders accept scales up to
FLT_MAX / 4 (int2) or / 8 (int4), and refuse indices that do not ascend.

Most of what a contribution holds is not in its payload but in the residual, and waits there for many rounds. The
residual is multiplied by 0.95 each time (SparseLoCo, arXiv 2508.15706: e <- 0.95 e + delta): what has waited for long
was computed from parameters that are gone. docs/results/sparse.md has what that is worth.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from atoll import kernels
from atoll.codec.kernel_codec import KernelCodec
from atoll.codec.protocol import BLOCK, U8, Payload
from atoll.errors import ConfigError, PayloadError

DEFAULT = "2%"
_PARAMETERS = re.compile(r"(\d{1,3}(?:\.\d{1,4})?)%(?::(int2|int4))?")


@dataclass(frozen=True, slots=True)
class TopK(KernelCodec):
    """k values of each block. Offers no more than any codec of the loops; what differs is which bytes are a payload."""

    kept: int = 0

    def check(self, payload: Payload, n: int) -> U8:
        data = super(TopK, self).check(payload, n)
        blocks = -(-n // BLOCK)
        if self.kept > 1 and blocks:
            indices = data[2 * blocks :].reshape(blocks, -1)[:, : self.kept]
            if not (indices[:, 1:] > indices[:, :-1]).all():
                raise PayloadError(f"a {self.name} payload names places that do not ascend; send it again")
        return data


@lru_cache(maxsize=64)
def topk(parameters: str) -> TopK:
    """The codec of `topk:PARAMETERS`. Equal parameters give the same object."""
    name = f"topk:{parameters}" if parameters else "topk"
    match = _PARAMETERS.fullmatch(parameters or DEFAULT)
    kept = round(float(match[1]) * BLOCK / 100) if match else 0
    if match is None or not 1 <= kept <= kernels.KEPT_MAX:
        raise ConfigError(
            f"{name!r} is no sparse codec: use topk:SHARE% or topk:SHARE%:int4, with a share from 0.2% to 25%, such as "
            "topk:2%"
        )
    bits, kind = (4, kernels.TOPK4) if match[2] == "int4" else (2, kernels.TOPK2)
    block_bytes = 2 + kept + -(-kept * bits // 8)
    return TopK(name, kernels.sparse_kind(kind, kept), lambda n: -(-n // BLOCK) * block_bytes, kept=kept)
