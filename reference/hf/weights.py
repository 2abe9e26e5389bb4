"""A model from a folder of open weights, and a folder from a model.

The folder holds config.json, safetensors files and, usually, tokenizer.json: what
`AutoModelForCausalLM.from_pretrained` reads. Tensors have the model's own names with `model.`
before all but `lm_head.weight`.
"""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reference.config import DecoderConfig
from reference.hf.config import decoder_config, hf_config
from reference.hf.folder import new_folder
from reference.hf.shards import (
    Stored,
    pieces,
    read_json,
    stored_tensors,
    write_json,
    write_shards,
)
from reference.model import Decoder

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MAX_SHARD_BYTES = 4 * 2**30


def load_pretrained(
    directory: Path | str,
    stack: Any,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of `directory` with the roles of `stack`, on `device`.

    dtype: of the parameters; None keeps the stored one, which then must be one for all tensors.
    compute_dtype: as in DecoderConfig. Memory: the model and 16 MB, since tensors are read in
    pieces, one after the other, into their place.

    Raises ValueError before any weight is read: config.json asks for what the reference does not
    implement (`decoder_config`); a tensor is missing, unexpected, of another shape or no float; a
    file is missing or damaged. And, on the way, for a tied model whose stored head is not the
    embedding, and for a `build_model` with buffers of its own, which are not in the files.
    """
    directory = Path(directory)
    config = decoder_config(read_json(directory / "config.json"))
    stored = stored_tensors(directory)
    with torch.device("meta"), _WithoutDrawing():
        model: nn.Module = stack.build_model(replace(config, compute_dtype=compute_dtype), stack)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    _require_tensors(shapes, stored, tied=config.tied_head)
    dtype = dtype or _one_dtype(stored)
    state = {}
    for name, shape in shapes.items():
        if name == HEAD and config.tied_head:
            continue  # not even for a moment: the table may be a quarter of the model
        state[name] = torch.empty(shape, dtype=dtype, device=device)
        for place, piece in pieces(hf_name(name), stored[hf_name(name)]):
            state[name][place].copy_(piece)
    if config.tied_head:
        state[HEAD] = state[EMBEDDING]
    model.load_state_dict(state, assign=True)
    left_empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left_empty:
        raise ValueError(f"the model has buffers that no file holds: {_some(left_empty)}")
    if config.tied_head and HEAD in stored:
        _require_the_same(stored[hf_name(EMBEDDING)], stored[HEAD])
    return model


def save_pretrained(
    model: nn.Module,
    directory: Path | str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_json: bytes | None = None,
    eos_token_id: int | None = None,
) -> None:
    """Writes config.json, the weights in their own dtype and, if given, tokenizer.json.

    A tied head is stored once, as the embedding. `directory` appears when it is whole.

    Raises ValueError for a model of another family, with other tensors than its configuration has
    (merge adapters first), of several dtypes, or whose head should be tied and differs; for a
    tokenizer that cannot be read or does not have eos_token_id; and if `directory` has content.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    config: Any = model.config
    tensors: dict[str, Tensor] = dict(model.state_dict())
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) != 1:
        raise ValueError(f"all weights must have one dtype, got {sorted(map(str, dtypes))}")
    fields = hf_config(config, dtypes.pop(), eos_token_id)
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    want = _reference_shapes(config)
    if got != want:
        raise ValueError(
            f"the tensors are not those of the configuration: missing {_some(want.keys() - got)}, "
            f"unexpected {_some(got.keys() - want)}, of another shape "
            f"{_some(name for name in got.keys() & want if got[name] != want[name])}"
        )
    if config.tied_head and not torch.equal(tensors[EMBEDDING], tensors.pop(HEAD)):
        raise ValueError(
            "tied_head is True, but lm_head.weight and embed_tokens.weight differ; tie them "
            "again or export with tied_head=False"
        )
    named = {hf_name(name): tensor for name, tensor in tensors.items()}
    with new_folder(Path(directory)) as temporary:
        write_checkpoint(
            temporary, fields, named, max_shard_bytes=max_shard_bytes, tokenizer_json=tokenizer_json
        )


def write_checkpoint(
    directory: Path,
    fields: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer_json: bytes | None = None,
) -> None:
    """config.json, safetensors files and the tokenizer's files into an existing folder.

    Raises ValueError, before anything is written, for a tokenizer that cannot be read or whose
    vocabulary does not have the eos_token_id of `fields`.
    """
    of_tokenizer = None if tokenizer_json is None else _tokenizer_fields(tokenizer_json, fields)
    write_json(directory / "config.json", fields)
    write_shards(directory, tensors, max_shard_bytes)
    for file in directory.glob("*.safetensors"):  # which the library makes private to the user
        shutil.copymode(directory / "config.json", file)
    if tokenizer_json is not None and of_tokenizer is not None:
        (directory / "tokenizer.json").write_bytes(tokenizer_json)
        write_json(directory / "tokenizer_config.json", of_tokenizer)


def _tokenizer_fields(tokenizer_json: bytes, fields: Mapping[str, Any]) -> dict[str, Any]:
    """What AutoTokenizer would not know from tokenizer.json: what ends a document."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"cannot read the tokenizer's json: {error}") from error
    eos = fields["eos_token_id"]
    spelling = None if eos is None else tokenizer.id_to_token(eos)
    if eos is not None and spelling is None:
        raise ValueError(f"eos_token_id {eos} is not in the tokenizer's vocabulary")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": spelling,
        "model_max_length": fields["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }


def hf_name(name: str) -> str:
    """The name in Hugging Face's files of the model's parameter `name`."""
    return name if name == HEAD else f"model.{name}"


class _WithoutDrawing(TorchFunctionMode):
    """No initial values: drawing them on meta would import torch's compiler, 160 MB of memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (nn.init.normal_, Tensor.normal_):
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def _reference_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"), _WithoutDrawing():
        state = Decoder(config, stack=None).state_dict()
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _require_tensors(
    shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, Stored], tied: bool
) -> None:
    want = {hf_name(name): shape for name, shape in shapes.items()}
    optional = {HEAD} if tied else set()
    missing = want.keys() - stored.keys() - optional
    unexpected = stored.keys() - want.keys()
    if missing or unexpected:
        raise ValueError(
            f"the tensors are not those of config.json: missing {_some(missing)}, unexpected "
            f"{_some(unexpected)}"
        )
    wrong = [
        f"{name} {list(tensor.shape)} instead of {list(want[name])}"
        for name, tensor in stored.items()
        if tensor.shape != want[name]
    ]
    if wrong:
        raise ValueError(f"tensors have other shapes than config.json says: {_some(wrong)}")
    no_floats = [f"{name} {t.dtype}" for name, t in stored.items() if t.torch_dtype is None]
    if no_floats:
        raise ValueError(f"weights must be F64, F32, F16 or BF16: {_some(no_floats)} are not")


def _one_dtype(stored: Mapping[str, Stored]) -> torch.dtype:
    dtypes = {tensor.torch_dtype for tensor in stored.values()}
    dtype = next(iter(dtypes))
    if len(dtypes) != 1 or dtype is None:
        raise ValueError(
            f"the tensors are stored in several dtypes, {sorted(map(str, dtypes))}; choose dtype"
        )
    return dtype


def _require_the_same(embedding: Stored, head: Stored) -> None:
    rows = zip(pieces(hf_name(EMBEDDING), embedding), pieces(HEAD, head), strict=True)
    if not all(torch.equal(one.double(), other.double()) for (_, one), (_, other) in rows):
        raise ValueError(
            "config.json says tie_word_embeddings, but lm_head.weight and "
            "model.embed_tokens.weight are stored and differ; correct one of them"
        )


def _some(names: Any) -> str:
    """The names in order, the first five of many."""
    ordered = sorted(names)
    rest = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return f"{', '.join(ordered[:5]) or 'none'}{rest}"
