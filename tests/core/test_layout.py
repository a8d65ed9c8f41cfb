from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.layout import BALANCE_MAX, BLOCK, build_layout, elements_of
from atoll.core.messages import TensorSpec
from atoll.errors import ConfigError, LayoutError


def gpt2(width: int, layers: int, vocabulary: int = 50257, context: int = 1024) -> list[TensorSpec]:
    shapes = {"wte": (vocabulary, width), "wpe": (context, width)}
    for i in range(layers):
        shapes |= {
            f"h.{i}.ln1.w": (width,),
            f"h.{i}.ln1.b": (width,),
            f"h.{i}.attn.w": (width, 3 * width),
            f"h.{i}.attn.b": (3 * width,),
            f"h.{i}.proj.w": (width, width),
            f"h.{i}.proj.b": (width,),
            f"h.{i}.fc.w": (width, 4 * width),
            f"h.{i}.fc.b": (4 * width,),
            f"h.{i}.out.w": (4 * width, width),
            f"h.{i}.out.b": (width,),
        }
    return [TensorSpec(name, shape, "float32") for name, shape in shapes.items()]


def llama(width: int, layers: int, hidden: int, vocabulary: int = 32000) -> list[TensorSpec]:
    shapes = {"embed": (vocabulary, width), "head": (vocabulary, width), "norm": (width,)}
    for i in range(layers):
        shapes |= {f"l.{i}.q": (width, width), f"l.{i}.k": (width // 4, width), f"l.{i}.v": (width // 4, width)}
        shapes |= {f"l.{i}.o": (width, width), f"l.{i}.gate": (hidden, width), f"l.{i}.up": (hidden, width)}
        shapes |= {f"l.{i}.down": (width, hidden), f"l.{i}.n1": (width,), f"l.{i}.n2": (width,)}
    return [TensorSpec(name, shape, "bfloat16") for name, shape in shapes.items()]


def moe(width: int, layers: int, experts: int, hidden: int, vocabulary: int = 32000) -> list[TensorSpec]:
    specs = llama(width, layers, 4, vocabulary)
    for i in range(layers):
        specs.append(TensorSpec(f"m.{i}.router", (experts, width), "bfloat16"))
        specs.append(TensorSpec(f"m.{i}.w1", (experts, hidden, width), "bfloat16"))
        specs.append(TensorSpec(f"m.{i}.w2", (experts, width, hidden), "bfloat16"))
    return specs


MODELS = {
    "gpt2-1M": gpt2(96, 8, 256, 128),
    "gpt2-124M": gpt2(768, 12),
    "gpt2-100B": gpt2(12288, 55),
    "llama-1M": llama(96, 6, 256, 512),
    "llama-7B": llama(4096, 32, 11008),
    "llama-70B": llama(8192, 80, 28672),
    "moe-1M": moe(64, 4, 8, 128, 256),
    "moe-47B": moe(4096, 32, 8, 14336),
    "moe-100B": moe(6144, 56, 16, 9000),
}


@pytest.mark.parametrize(("name", "fragments"), list(itertools.product(MODELS, (1, 2, 8, 24, 64))))
def test_no_fragment_is_above_1_1_times_the_mean(name: str, fragments: int) -> None:
    layout = build_layout(MODELS[name], fragments)
    mean = layout.parameters / fragments
    assert layout.parameters == sum(map(elements_of, MODELS[name]))
    assert max(fragment.parameters for fragment in layout.fragments) <= BALANCE_MAX * mean
    assert max(fragment.size for fragment in layout.fragments) <= BALANCE_MAX * mean * 1.05


specs = st.lists(st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple), min_size=1, max_size=12).map(
    lambda shapes: [TensorSpec(f"t{i}", s, "float32") for i, s in enumerate(shapes)]
)


@settings(max_examples=200, deadline=None)
@given(specs, st.integers(1, 12))
def test_slices_cover_every_element_once_on_block_boundaries(tensors: list[TensorSpec], fragments: int) -> None:
    try:
        layout = build_layout(tensors, fragments)
    except LayoutError as error:
        assert "--fragments" in str(error)
        assert sum(-(-elements_of(t) // BLOCK) for t in tensors) < fragments
        return
    seen = {index: [] for index in range(len(tensors))}
    assert all(fragment.slices for fragment in layout.fragments)
    for fragment in layout.fragments:
        end = 0
        for piece in fragment.slices:
            assert piece.offset == end and piece.offset % BLOCK == 0
            end = piece.offset + -(-piece.size // BLOCK) * BLOCK
            seen[piece.tensor].append((piece.start, piece.stop))
        assert end == fragment.size
    for index, spans in seen.items():
        edges = sorted(spans)
        assert edges[0][0] == 0 and edges[-1][1] == elements_of(tensors[index])
        assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))
    assert build_layout(tensors, fragments).fingerprint == layout.fingerprint


def test_the_fingerprint_sees_names_shapes_dtypes_modes_and_fragments() -> None:
    base = [TensorSpec("a", (600, 2), "float32"), TensorSpec("b", (600,), "float32")]
    others = [
        [TensorSpec("x", (600, 2), "float32"), base[1]],
        [TensorSpec("a", (300, 4), "float32"), base[1]],
        [TensorSpec("a", (600, 2), "bfloat16"), base[1]],
        [TensorSpec("a", (600, 2), "float32", "mean"), base[1]],
    ]
    prints = {build_layout(tensors, 2).fingerprint for tensors in [base, *others]}
    assert len(prints | {build_layout(base, 3).fingerprint}) == 6


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no trainable parameters"),
        ([TensorSpec("a", (3,), "f"), TensorSpec("a", (4,), "f")], "two tensors are called 'a'"),
        ([TensorSpec("a", (0, 3), "f")], "empty shape"),
        ([TensorSpec("a", (300,), "f", "median")], "one of rda, mean"),
    ],
)
def test_bad_models_are_refused(tensors: list[TensorSpec], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_layout(tensors, 1)
