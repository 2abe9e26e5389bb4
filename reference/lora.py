"""Adapters of low rank (LoRA) beside frozen matrices, by the library peft.

A projection with an adapter computes x W^T + b + alpha / rank * (x A^T) B^T with A [rank, I] and
B [O, rank]. B starts at zero, so the model starts as its base. An adapter is stored like
its matrix and computes in that dtype, float32 also where the model computes in bfloat16; it is
added to the rounded output of the base, and the sum is rounded.

Source: Hu et al. 2021, section 4.1.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reference.hf.folder import new_folder
from reference.hf.shards import read_json, write_json
from reference.layers import Linear

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# peft's files name a tensor by its place in the model that transformers builds.
FILE_PREFIX = "base_model.model.model."
# What a configuration may say besides rank, alpha and targets without changing what is computed.
_WITHOUT_EFFECT = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core", "peft_version",
    "qalora_group_size", "revision", "runtime_config", "task_type",
})  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian")  # others change the base weights


def add_adapters(
    model: nn.Module, rank: int, alpha: float, targets: Sequence[str], seed: int
) -> nn.Module:
    """Puts an adapter beside every matrix whose name is in `targets`, in place; returns `model`.

    Everything else is frozen: only adapters receive gradients. A is drawn on the CPU from a
    generator with this seed (uniform within 1/sqrt(I)), so every device gets the same.
    targets: such as PROJECTIONS. The head cannot be one: the loss reads its weight directly.

    Raises ValueError for a rank or alpha that is not above 0, a target that is no matrix of the
    model's layers, a model that has adapters, or where peft is not installed.
    """
    _refuse_adapters(model)
    config = _lora_config(model, rank, alpha, targets)
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator, on the CPU
        _peft().inject_adapter_in_model(config, model)
    generator = torch.Generator().manual_seed(seed)
    for _, adapted in _adapted(model):
        # peft gives adapters the dtype in which their matrix computes, or rounds them to it.
        adapted.to(adapted.weight.dtype)
        A = adapted.lora_A["default"].weight
        drawn = torch.rand(A.shape, generator=generator) * 2 - 1
        with torch.no_grad():
            A.copy_(drawn / math.sqrt(A.shape[1]))
    return model


@torch.no_grad()
def merge_adapters(model: nn.Module) -> nn.Module:
    """W <- W + alpha / rank * B A, in place; returns `model` without adapters, trained whole again.

    The sum is rounded to W's dtype. Raises ValueError for a model without adapters, or where a
    merged weight is not finite; the matrices before that one are merged by then.
    """
    for name, adapted in _adapted(model):
        adapted.merge(safe_merge=True)
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, adapted.get_base_layer())
    del model.peft_config
    return model.requires_grad_(True)


def save_adapters(model: nn.Module, directory: Path | str) -> None:
    """Writes the adapters alone: adapter_config.json and adapter_model.safetensors, as peft does.

    `PeftModel.from_pretrained` reads them beside the model of transformers. `directory` appears
    when it is whole. Raises ValueError for a model without adapters and if `directory` has content.
    """
    from safetensors.torch import save_file

    tensors = {
        FILE_PREFIX + name: tensor.detach().cpu().contiguous()
        for name, tensor in _adapter_tensors(model).items()
    }
    config: Any = model.peft_config
    fields = config["default"].to_dict()
    fields["target_modules"] = sorted(fields["target_modules"])
    with new_folder(Path(directory)) as temporary:
        write_json(temporary / CONFIG, json.loads(json.dumps(fields)))
        save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})


def load_adapters(model: nn.Module, directory: Path | str) -> nn.Module:
    """Puts the saved adapters beside the matrices of `model`, in place; returns `model`.

    That the base weights are those they were trained on cannot be seen from the files.

    Raises ValueError, before the model is changed, for a configuration that asks for more than
    plain LoRA, for a tensor that is missing, unexpected or of another shape, and as add_adapters.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    directory = Path(directory)
    fields = read_json(directory / CONFIG)
    _refuse_adapters(model)
    rank, alpha, targets = _plain_lora(fields, model, directory / CONFIG)
    try:
        stored = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {directory / WEIGHTS}: {error}") from error
    want = {FILE_PREFIX + name: shape for name, shape in _shapes(model, rank, targets).items()}
    wrong = sorted(
        name
        for name in want.keys() | stored.keys()
        if name not in stored or tuple(stored[name].shape) != want.get(name)
    )
    if wrong:
        raise ValueError(
            f"{directory / WEIGHTS}: {len(wrong)} tensors are missing, unexpected or of another "
            f"shape than rank {rank} and this model ask for; the first is {wrong[0]}"
        )
    add_adapters(model, rank, alpha, targets, seed=0)
    with torch.no_grad():
        for name, tensor in _adapter_tensors(model).items():
            tensor.copy_(stored[FILE_PREFIX + name])
    return model


def adapter_fields(model: nn.Module) -> dict[str, Any] | None:
    """What add_adapters was given: rank, alpha and the sorted targets; None without adapters."""
    chosen: Any = getattr(model, "peft_config", None)
    if not chosen:
        return None
    config = chosen["default"]
    targets = sorted(config.target_modules)
    return {"rank": config.r, "alpha": config.lora_alpha, "targets": targets}


def _lora_config(model: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> Any:
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"the rank must be a whole number of at least 1, got {rank!r}")
    if not isinstance(alpha, int | float) or not (alpha > 0 and math.isfinite(alpha)):
        raise ValueError(f"alpha must be a finite number above 0, got {alpha!r}")
    known = {name.rpartition(".")[2] for name, _ in _matrices(model)}
    unknown = sorted(set(targets) - known)
    if unknown or not targets:
        raise ValueError(
            f"targets must name matrices of the layers, which are {sorted(known)}; got "
            f"{list(targets)}"
        )
    return _peft().LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=sorted(set(targets)), task_type="CAUSAL_LM"
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, Linear) and name != "lm_head":
            yield name, module


def _shapes(model: nn.Module, rank: int, targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    shapes = {}
    for name, matrix in _matrices(model):
        if name.rpartition(".")[2] in targets:
            shapes[f"{name}.lora_A.weight"] = (rank, matrix.in_features)
            shapes[f"{name}.lora_B.weight"] = (matrix.out_features, rank)
    return shapes


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    adapter_class = _peft().tuners.lora.LoraLayer
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, adapter_class)]
    if not found:
        raise ValueError("the model has no adapters; add_adapters or load_adapters makes them")
    return found


def _adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The parameters A and B of every adapter, by their names in a file without its prefix."""
    return {
        f"{name}.{kind}.weight": getattr(adapted, kind)["default"].weight
        for name, adapted in _adapted(model)
        for kind in ("lora_A", "lora_B")
    }


def _refuse_adapters(model: nn.Module) -> None:
    if hasattr(model, "peft_config"):
        raise ValueError("the model has adapters already; merge_adapters first")


def _plain_lora(
    fields: dict[str, Any], model: nn.Module, file: Path
) -> tuple[int, float, list[str]]:
    """Rank, alpha and targets of a configuration that asks for nothing else."""
    if fields.get("peft_type") != "LORA" or not isinstance(fields.get("target_modules"), list):
        raise ValueError(
            f"{file} must have peft_type LORA and a list of target_modules, got "
            f"{fields.get('peft_type')!r} and {fields.get('target_modules')!r}"
        )
    if fields.get("init_lora_weights", True) not in _PLAIN_STARTS:
        raise ValueError(f"{file}: init_lora_weights {fields['init_lora_weights']!r} is not read")
    rank, alpha, targets = fields.get("r"), fields.get("lora_alpha"), fields["target_modules"]
    plain = _lora_config(model, rank, alpha, targets).to_dict()  # type: ignore[arg-type]
    for name in fields.keys() - _WITHOUT_EFFECT - {"target_modules", "init_lora_weights"}:
        # A field that this peft does not know counts as set unless it is empty.
        if fields[name] != plain.get(name) and fields[name] not in (None, False, {}, []):
            raise ValueError(f"{file}: {name} {fields[name]!r} is not read; only plain LoRA is")
    return rank, alpha, targets  # type: ignore[return-value]


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"adapters need peft ({error}); pip install peft") from error
    return peft
