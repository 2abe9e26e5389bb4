"""Parameters: how many numbers a configuration trains, by part.

Decoder (RMSNorm, SwiGLU, grouped queries), V vocabulary, D width, F feed-forward width, L layers,
N query heads and K key/value heads of width H:

    vocabulary table V D, once if the head is tied, twice if it is not
    attention L D H (2 N + 2 K)        q and o are D x NH, k and v are D x KH
    feed-forward 3 L D F               gate, up, down
    biases L H (N + 2 K) if qkv_bias   on q, k, v only
    norms 2 L D + D

Character GPT (learned positions T, LayerNorm, GELU, biases, untied head):

    2 V D + T D + L (12 D^2 + 13 D) + 2 D

Sources: the weight shapes of Hugging Face Qwen2 and of nanoGPT. Everything is an exact integer.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference.config import CharGPTConfig, DecoderConfig, ModelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Numbers of trained parameters. A table that is used twice (tied head) is counted once."""

    embedding: int  # [V, D]
    positions: int  # [T, D]; 0 with rotary positions
    attention: int  # matrices of q, k, v, o
    feed_forward: int  # matrices
    head: int  # [V, D]; 0 if tied, because it is the embedding
    biases: int
    norms: int

    @property
    def total(self) -> int:
        """All parameters, P."""
        return self.embedding + self.positions + self.layers + self.head + self.biases + self.norms

    @property
    def layers(self) -> int:
        """Matrices inside the layers: those that activation recomputation multiplies again."""
        return self.attention + self.feed_forward

    @property
    def without_vocabulary(self) -> int:
        """All but the vocabulary tables."""
        return self.total - self.embedding - self.head

    @property
    def multiplying(self) -> int:
        """Weights in a matrix product for every token: the layers' matrices and the head.

        A lookup multiplies nothing, so an untied embedding, learned positions, biases and gains
        are left out; a tied table is counted once, for its use as the head.
        """
        return self.layers + (self.head or self.embedding)

    @property
    def decayed(self) -> int:
        """Elements of the parameters of two dimensions, which take weight decay."""
        return self.total - self.undecayed

    @property
    def undecayed(self) -> int:
        """Elements of the parameters of one dimension: biases and gains."""
        return self.biases + self.norms


def parameter_count(config: ModelConfig) -> ParameterCount:
    """Parameters of the model that `config` describes, by part. See the module for the formula.

    Raises:
        ValueError: `config` is of neither kind.
    """
    if isinstance(config, DecoderConfig):
        return _decoder(config)
    if isinstance(config, CharGPTConfig):
        return _chargpt(config)
    raise ValueError(
        f"parameter_count needs a DecoderConfig or a CharGPTConfig, got {type(config).__name__}"
    )


def _decoder(config: DecoderConfig) -> ParameterCount:
    width, layers = config.model_width, config.num_layers
    query_width = config.num_query_heads * config.head_width
    kv_width = config.num_kv_heads * config.head_width
    table = config.vocabulary_size * width
    return ParameterCount(
        embedding=table,
        positions=0,
        attention=layers * width * (2 * query_width + 2 * kv_width),
        feed_forward=layers * 3 * width * config.feed_forward_width,
        head=0 if config.tied_head else table,
        biases=layers * (query_width + 2 * kv_width) if config.qkv_bias else 0,
        norms=layers * 2 * width + width,
    )


def _chargpt(config: CharGPTConfig) -> ParameterCount:
    width, layers = config.model_width, config.num_layers
    table = config.vocabulary_size * width
    return ParameterCount(
        embedding=table,
        positions=config.max_positions * width,
        attention=layers * 4 * width**2,
        feed_forward=layers * 8 * width**2,
        head=table,
        biases=layers * (4 * width + 5 * width),  # q, k, v, o; then 4D up and D down
        norms=layers * 4 * width + 2 * width,  # gain and bias each
    )


def query_width(config: ModelConfig) -> int:
    """N H: the width over which attention scores are taken. It need not equal D."""
    if isinstance(config, CharGPTConfig):
        return config.model_width
    return config.num_query_heads * config.head_width


def rotary_frequencies(config: DecoderConfig) -> tuple[float, ...]:
    """Radians per position of each of the H/2 rotated pairs, theta^(-2i/H) (RoPE, section 3.4.3).

    The books print them because a loader that drops theta from a configuration changes nothing
    else: every shape and count stays right.
    """
    half = config.head_width // 2
    return tuple(float(config.rope_theta) ** (-index / half) for index in range(half))
