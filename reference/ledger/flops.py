"""FLOPs of training, under a stated convention; 1 multiply-add = 2 FLOPs.

Three matrix products train a weight: the output, the input's gradient, the weight's gradient. A
token therefore costs 6 FLOPs a weight. Attention takes, for each head, two products of T x T x H
forward and four backward, so a token costs 12 L T N H over the full score matrix and about half
of it, 6 L T N H, when only the causal half counts (the diagonal is left to the half). N H is the
query width; where it equals D this is the usual kappa L T D.

What is multiplied is a convention too:

    "parameters"  6 P: every stored parameter, the published 6 N D (Kaplan et al. 2020, 2.1)
    "products"    6 x the weights in a matrix product: no lookup, gain or bias. With kappa 12 this
                  equals what torch's FlopCounterMode counts for an unfused model, exactly.

Left out of both: softmax, norms, rotary angles, activation functions, optimizer. Sources: PaLM
(Chowdhery et al. 2022, appendix B) for kappa 12 and for model against hardware FLOPs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from reference.config import ModelConfig
from reference.ledger.parameters import parameter_count, query_width

KAPPA_NONE, KAPPA_CAUSAL, KAPPA_FULL = 0, 6, 12


@dataclass(frozen=True)
class FlopsConvention:
    """What counts. It stays with every number that was counted under it.

    weights: "parameters" or "products", as in the module's text.
    kappa: 0 without attention, 6 its causal half, 12 the full score matrix.
    recompute_layers: the backward pass runs every layer forward again (activation checkpointing).
    recompute_scores: the backward pass takes the score product again (a fused attention kernel).

    Both recomputations are work of the hardware, never of the model. Raises ValueError for another
    kappa or kind of weights, and for scores recomputed where attention is not counted.
    """

    weights: Literal["parameters", "products"]
    kappa: int
    recompute_layers: bool = False
    recompute_scores: bool = False

    def __post_init__(self) -> None:
        if self.weights not in ("parameters", "products"):
            raise ValueError(f'weights must be "parameters" or "products", got {self.weights!r}')
        if self.kappa not in (KAPPA_NONE, KAPPA_CAUSAL, KAPPA_FULL):
            raise ValueError(
                f"kappa must be 0 (no attention), 6 (causal half) or 12 (full scores), got "
                f"{self.kappa}; what a kernel computes again is recompute_scores, not kappa"
            )
        if self.recompute_scores and self.kappa == KAPPA_NONE:
            raise ValueError("recompute_scores needs attention in the count: kappa 6 or 12")

    @property
    def text(self) -> str:
        """The convention in words and symbols, as printed beside the number."""
        counted = {"parameters": "6 P", "products": "6 x multiplying weights"}[self.weights]
        attention = {
            KAPPA_NONE: ", attention not counted",
            KAPPA_CAUSAL: " + 6 L T N H (causal half)",
            KAPPA_FULL: " + 12 L T N H (full scores)",
        }[self.kappa]
        again = " and ".join(
            name
            for name, used in [("layers", self.recompute_layers), ("scores", self.recompute_scores)]
            if used
        )
        return counted + attention + (f"; hardware runs {again} again" if again else "")


@dataclass(frozen=True)
class TrainingFlops:
    """FLOPs of training on `num_tokens` tokens in rows of `context_tokens`."""

    weights_per_token: int
    attention_per_token: int
    recomputed_per_token: int
    num_tokens: int
    context_tokens: int
    convention: FlopsConvention

    @property
    def model_per_token(self) -> int:
        """What the objective needs, forward and backward: the numerator of MFU."""
        return self.weights_per_token + self.attention_per_token

    @property
    def hardware_per_token(self) -> int:
        """What the device computes, recomputation included: the numerator of HFU."""
        return self.model_per_token + self.recomputed_per_token

    @property
    def model_total(self) -> int:
        """`model_per_token` over all tokens."""
        return self.model_per_token * self.num_tokens

    @property
    def hardware_total(self) -> int:
        """`hardware_per_token` over all tokens."""
        return self.hardware_per_token * self.num_tokens


def flops_of_parameters(num_parameters: int, num_tokens: int) -> int:
    """6 P D for a number of parameters that stands without a configuration (a model card)."""
    return 6 * num_parameters * num_tokens


def training_flops(
    config: ModelConfig, num_tokens: int, context_tokens: int, convention: FlopsConvention
) -> TrainingFlops:
    """FLOPs of one pass over `num_tokens` tokens, forward and backward, in exact integers.

    Attention is charged as if each token stood in one document as long as its row: shorter
    documents need less and are not credited. A second forward pass of the layers costs 2 FLOPs a
    weight of their matrices and kappa / 3 for attention; scores taken again cost kappa / 6.

    Raises:
        ValueError: fewer than 1 token, or a row longer than the configuration's positions.
    """
    if num_tokens < 1 or not 1 <= context_tokens <= config.max_positions:
        raise ValueError(
            f"training_flops needs at least 1 token in rows of 1 to {config.max_positions} "
            f"(max_positions), got {num_tokens} tokens in rows of {context_tokens}"
        )
    parameters = parameter_count(config)
    weights = parameters.total if convention.weights == "parameters" else parameters.multiplying
    positions = config.num_layers * context_tokens * query_width(config)
    recomputed = 0
    if convention.recompute_layers:
        recomputed += 2 * parameters.layers + convention.kappa // 3 * positions
    if convention.recompute_scores:
        recomputed += convention.kappa // 6 * positions
    return TrainingFlops(
        weights_per_token=6 * weights,
        attention_per_token=convention.kappa * positions,
        recomputed_per_token=recomputed,
        num_tokens=num_tokens,
        context_tokens=context_tokens,
        convention=convention,
    )
