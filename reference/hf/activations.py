"""What the operators really read: their inputs while SmolLM2 reads documentation of Python.

Random inputs have no outlying channels, no attention sinks and no sharp logits; these have. They
are recorded at the first use, kept in the cache beside the weights, and recorded again by
`python -m reference.hf.activations`.
"""

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from reference import layers, loss, model, ops
from reference.data.corpus import CorpusDocument, python_topics
from reference.data.json_tokenizer import JsonTokenizer
from reference.data.labels import make_labels
from reference.data.pack import Rows, pack
from reference.hf.folder import FolderTakenError, new_folder
from reference.hf.shards import pieces, read_json, stored_tensors, write_json
from reference.hf.smollm2 import smollm2
from reference.hf.weights import EMBEDDING, HEAD, hf_name

ROW_TOKENS = 96
# Of four documents, with their ends: one fills the first row, three share the second.
DOCUMENT_TOKENS = (97, 40, 37, 20)
TENSORS, MANIFEST = "activations.safetensors", "manifest.json"


@dataclass(frozen=True, eq=False)
class Recorded:
    """One call of a role.

    name: the module that made it ("layers.15.input_layernorm"), `lm_head` for the loss.
    arguments: what the role got, in its order: tensors (float32, or integers for positions,
    documents and labels), numbers, None.
    """

    role: str
    name: str
    arguments: tuple[Any, ...]


def recorded(role: str, cache: Path | None = None) -> list[Recorded]:
    """The calls of `role` in the first, the middle and the last layer, and after the last.

    B 2, T 96, two rows of documentation, the second with four documents in it; the widths are
    SmolLM2's: D 576, F 1536, N 9, K 3, H 64, V 49152. Weights are read from the model's own file.

    Raises ValueError for a role that the model does not call, if the recording is not what was
    recorded (by its SHA-256), and as `smollm2` does.
    """
    directory = activations(cache)
    manifest = read_json(directory / MANIFEST)
    sha256 = hashlib.sha256((directory / TENSORS).read_bytes()).hexdigest()
    if sha256 != manifest["sha256"]:
        raise ValueError(
            f"{directory / TENSORS} is not what was recorded; python -m reference.hf.activations "
            f"records it again"
        )
    calls = [call for call in manifest["calls"] if call["role"] == role]
    if not calls:
        known = sorted({call["role"] for call in manifest["calls"]})
        raise ValueError(f"nothing is recorded of the role {role!r}; there is {', '.join(known)}")
    read = _Reader(directory / TENSORS, smollm2(cache))
    return [
        Recorded(role, call["name"], tuple(read.argument(entry) for entry in call["arguments"]))
        for call in calls
    ]


def activations(cache: Path | None = None, anew: bool = False) -> Path:
    """The folder of the recording; it is recorded if it is not there.

    Its name holds the hashes of the weights and of the text and code that made it. anew: removes
    this recording, and those of other text and code, first.
    """
    source = smollm2(cache)
    documents = _documents()
    made_of = [document.data for document in documents]
    made_of += [Path(str(module.__file__)).read_bytes() for module in (layers, loss, model, ops)]
    made_of.append(Path(__file__).read_bytes())
    key = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_of)).hexdigest()
    directory = source.with_name(f"{source.name}-activations-{key[:16]}")
    if anew:
        for old in source.parent.glob(f"{source.name}-activations-*"):
            shutil.rmtree(old)
    if not directory.exists():
        try:
            with new_folder(directory) as temporary:
                _record(source, documents, temporary)
        except FolderTakenError:
            pass  # another process was faster; it recorded the same
    return directory


def _documents() -> list[CorpusDocument]:
    """The longest topics of the running Python's documentation."""
    by_length = sorted(python_topics(), key=lambda document: (-len(document.data), document.name))
    return by_length[: len(DOCUMENT_TOKENS)]


def _record(source: Path, documents: Sequence[CorpusDocument], directory: Path) -> None:
    from safetensors.torch import save_file

    from reference.stack import OPERATORS, ROLES  # which imports this package

    rows = _rows(source, documents)
    recorder = _Recorder()
    wrapped = {role: recorder.wrap(role, function) for role, function in OPERATORS.items()}
    stack = SimpleNamespace(**{**ROLES, **wrapped})
    decoder = stack.load_pretrained(source, stack)
    recorder.watch(decoder)
    with torch.no_grad():
        ids_BT, documents_BT = rows.tokens[:, :-1], rows.documents[:, :-1]
        hidden_BTD = decoder(ids_BT, rows.positions[:, :-1], documents_BT)
        labels_BT = make_labels(rows.tokens, rows.documents, "inside")[:, :-1]
        recorder.modules.append(HEAD.removesuffix(".weight"))
        stack.token_nll(hidden_BTD.flatten(0, 1), decoder.lm_head.weight, labels_BT.flatten())
    save_file(recorder.tensors, directory / TENSORS)
    sha256 = hashlib.sha256((directory / TENSORS).read_bytes()).hexdigest()
    topics = {document.name: document.sha256 for document in documents}
    manifest = {"sha256": sha256, "weights": source.name, "text": topics, "calls": recorder.calls}
    write_json(directory / MANIFEST, manifest)


def _rows(source: Path, documents: Sequence[CorpusDocument]) -> Rows:
    """The beginnings of the documents, each closed by EOS, packed into two rows."""
    tokenizer = JsonTokenizer(source)
    beginnings = [
        torch.cat((tokenizer.encode(document.data)[: length - 1], torch.tensor([tokenizer.eos])))
        for document, length in zip(documents, DOCUMENT_TOKENS, strict=True)
    ]
    return pack(beginnings, ROW_TOKENS, "drop")


@dataclass
class _Recorder:
    """Keeps the arguments of the roles that watched modules call. Weights are kept by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # that are running, the innermost last
    _parameters: dict[int, str] = field(default_factory=dict)
    _layers: tuple[str, ...] = ()

    def watch(self, decoder: nn.Module) -> None:
        self._parameters = {id(p): name for name, p in decoder.named_parameters()}
        num_layers = len(decoder.layers)  # type: ignore[arg-type]
        self._layers = tuple(f"layers.{i}." for i in (0, num_layers // 2, num_layers - 1))
        for name, module in decoder.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self.modules.append(name))
            module.register_forward_hook(lambda *_: self._leave())

    def _leave(self) -> None:
        self.modules.pop()

    def wrap(self, role: str, function: Any) -> Callable[..., Any]:
        def recording(*arguments: Any) -> Any:
            name = self.modules[-1]
            if not name.startswith("layers.") or name.startswith(self._layers):
                entries = [self._entry(argument) for argument in arguments]
                self.calls.append({"role": role, "name": name, "arguments": entries})
            return function(*arguments)

        return recording

    def _entry(self, argument: Any) -> dict[str, Any]:
        if not isinstance(argument, Tensor):
            return {"value": argument}
        if id(argument) in self._parameters:
            return {"parameter": self._parameters[id(argument)]}
        key = f"{len(self.tensors):04d}"
        self.tensors[key] = argument.detach().clone().contiguous()
        return {"tensor": key}


class _Reader:
    """The arguments back from the entries of the manifest."""

    def __init__(self, tensors: Path, weights: Path) -> None:
        self.tensors, self.weights = tensors, stored_tensors(weights)

    def argument(self, entry: dict[str, Any]) -> Any:
        if "value" in entry:
            return entry["value"]
        if "tensor" in entry:
            from safetensors import safe_open

            with safe_open(self.tensors, framework="pt") as file:
                return file.get_tensor(entry["tensor"])
        name = EMBEDDING if entry["parameter"] == HEAD else entry["parameter"]
        stored = self.weights[hf_name(name)]
        return torch.cat([piece for _, piece in pieces(hf_name(name), stored)])


def main() -> None:
    """Records anew and prints what was recorded."""
    directory = activations(anew=True)
    print(f"recorded in {directory}")
    for role in sorted({call["role"] for call in read_json(directory / MANIFEST)["calls"]}):
        for call in recorded(role):
            sizes = [
                f"{list(x.shape)} up to {x.abs().max():.4g}"
                if isinstance(x, Tensor) and x.is_floating_point()
                else str(list(x.shape) if isinstance(x, Tensor) else x)
                for x in call.arguments
            ]
            print(f"{role:13s} {call.name:35s} {'; '.join(sizes)}")


if __name__ == "__main__":
    main()
