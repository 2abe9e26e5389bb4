"""Random configurations for the gates of the ledger, and the reference stack as their oracle."""

from __future__ import annotations

from hypothesis import strategies as st

from harness import Stack
from reference.config import CharGPTConfig, DecoderConfig
from reference.stack import ROLES

REFERENCE = Stack(ROLES)


@st.composite
def decoders(draw):
    """A small decoder. The head width is drawn by itself, so N H is seldom D.

    The simplest one, with which hypothesis begins, is already grouped, biased and untied.
    """
    num_kv_heads = draw(st.integers(1, 4))
    return DecoderConfig(
        vocabulary_size=draw(st.integers(2, 40)),
        model_width=draw(st.integers(1, 24)),
        feed_forward_width=draw(st.integers(1, 40)),
        num_layers=draw(st.integers(1, 3)),
        num_query_heads=num_kv_heads * draw(st.sampled_from([2, 1, 3, 4])),
        num_kv_heads=num_kv_heads,
        head_width=2 * draw(st.integers(1, 6)),
        max_positions=64,
        qkv_bias=draw(st.sampled_from([True, False])),
        tied_head=draw(st.sampled_from([False, True])),
    )


@st.composite
def chargpts(draw):
    """A small character GPT."""
    num_heads = draw(st.integers(1, 4))
    return CharGPTConfig(
        vocabulary_size=draw(st.integers(2, 40)),
        model_width=num_heads * draw(st.integers(1, 8)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=num_heads,
        max_positions=draw(st.integers(8, 64)),
    )
