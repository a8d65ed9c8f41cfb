"""Which tensors merge by plain mean, by their names.

Most rows of an embedding are untouched in most steps, and a direction averaged over such rows means little (the paper's
tables 8 and 9). So token embeddings, position embeddings and output heads take the mean, whatever the run's `merge`.
"""

from __future__ import annotations

import re

EMBEDDING_LIKE = re.compile(
    r"(^|[._])(embed(ding)?s?|[a-z]*_?embeddings?|wte|wpe|tok_embeddings|embed_tokens|lm_head|head|unembed|output_layer)"
    r"([._]|$)"
)
"""Names under which they go in the common code bases."""


def merge_mode(name: str) -> str:
    """ "mean" for what looks like an embedding or a head, else "rda": as the run's setting says."""
    return "mean" if EMBEDDING_LIKE.search(name) else "rda"
