"""A codec that a learner's build does not know: it is given one that it does, or refused by name."""

from __future__ import annotations

import pytest

from atoll.core.admission import check_settings, codec_up_for
from atoll.core.config import SyncConfig
from atoll.core.messages import Hello, Refusal, TensorSpec

TENSORS = (TensorSpec("w", (4,), "float32"),)


def hello(*codecs: str, protocol: int = 3) -> Hello:
    return Hello("paris", "i", protocol, TENSORS, codecs=codecs)


@pytest.mark.parametrize("known", [(), ("int4", "int2")])
def test_contributions_of_an_older_build_are_in_int4(known: tuple[str, ...]) -> None:
    config = SyncConfig(codec_up="topk:2%")
    assert check_settings(hello(*known), config) is None
    assert codec_up_for(hello(*known), config) == "int4"
    assert codec_up_for(hello("int4", "topk"), config) == "topk:2%"


def test_an_older_build_cannot_decode_what_is_published_and_hears_so() -> None:
    refused = check_settings(hello("int4"), SyncConfig(codec_down="topk:10%"))
    assert refused is not None and refused.code == Refusal.CODEC
    assert "codec_down topk:10%" in refused.detail and "'paris'" in refused.detail
    assert check_settings(hello("int4", "topk"), SyncConfig(codec_down="topk:10%")) is None


def test_a_user_s_own_codec_is_trusted_to_be_there_where_no_list_came() -> None:
    assert codec_up_for(hello(), SyncConfig(codec_up="int2")) == "int2"
    assert codec_up_for(hello("int4"), SyncConfig(codec_up="int2")) == "int4"
