"""What a state may hold at most. It may come from a peer or a damaged disk, so reading it is bounded everywhere."""

from __future__ import annotations

BLOB_BYTES_MAX = 256 * 2**30
"""AdamW's moments of 32 billion parameters in fp32: more than one process holds."""
HEADER_BYTES_MAX = 100_000_000
"""The safetensors library's own limit on a header."""
TENSORS_MAX = 262_144
"""At about 300 bytes each, in the header and in the tree, this many fit the header."""
NODES_MAX = 2_000_000
"""Values in the tree: a few per tensor. A million-entry list belongs into a tensor."""
DEPTH_MAX = 32
"""Containers inside each other. An optimizer's state is 4 deep; a cycle would have no end."""
DIMENSIONS_MAX = 64
"""PyTorch's own limit."""
COPIES_MAX = 4
"""How often, on average, the data of a state may be copied while its tree is read. A tensor is copied at most once."""
INLINE_BYTES_MAX = 2**20
"""`bytes` values and very long integers, which are written into the tree."""
NAME_CHARS_MAX = 200
"""Tensor names are the paths to them; a longer one is cut and numbered."""
TEXT_CHARS_MAX = 4096
"""Learner and run ids."""
COUNT_MAX = 2**62
"""Steps, tokens and versions, as on the wire."""
