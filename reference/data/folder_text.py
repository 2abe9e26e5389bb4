"""A prepared folder as the training command uses it: nothing of it is taken on trust."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reference.config import DecoderConfig, ModelConfig
from reference.data.loader import Loader, LoaderSettings
from reference.data.manifest import (
    TOKENIZER,
    TRAIN,
    VALIDATION,
    DataError,
    Manifest,
    read_manifest,
    require_uncontaminated,
)
from reference.data.open_tokenizer import Tokenizer, open_tokenizer
from reference.data.policy import PackingPolicy
from reference.data.training_text import MICROBATCHES_PER_WINDOW, ROWS_PER_MICROBATCH
from reference.data.windows import SplitWindows
from reference.window import Window

NUM_WORKERS = 1


@dataclass(frozen=True)
class FolderText:
    """Both splits of a folder under the policy of its manifest, and its tokenizer."""

    manifest: Manifest
    tokenizer: Tokenizer
    training: SplitWindows
    held_out: SplitWindows
    stack: Any
    remark: str = ""

    @property
    def row_tokens(self) -> int:
        """T."""
        return self.training.policy.window_tokens

    @property
    def training_sha256(self) -> str:
        """Of the manifest, the split and the policy."""
        return self.training.sha256

    @property
    def held_out_sha256(self) -> str:
        """Of the manifest, the split and the policy."""
        return self.held_out.sha256

    @property
    def held_out_bytes(self) -> int:
        """Of the text of the validation documents, as their sources count it."""
        sources = self.held_out.sources
        shards = self.manifest.shards_of(VALIDATION)
        return sum(shard.num_bytes for shard in shards if shard.source in sources)

    def windows(self, seed: int, num_updates: int) -> Loader:
        """The first `num_updates` updates, mixed as the manifest's weights say."""
        settings = LoaderSettings(
            seed=seed,
            num_updates=num_updates,
            rows_per_microbatch=ROWS_PER_MICROBATCH,
            microbatches_per_window=MICROBATCHES_PER_WINDOW,
            weights=declared_weights(self.manifest, self.training),
            num_workers=NUM_WORKERS,
        )
        return Loader(self.training, settings, self.stack)

    def held_out_windows(self) -> Iterator[Window]:
        """Every validation window once, in order."""
        windows, stack = self.held_out, self.stack
        for numbers in torch.split(torch.arange(windows.num_windows), ROWS_PER_MICROBATCH):
            rows = windows.read(numbers)
            yield Window(
                (stack.apply_policy(rows, windows.policy, windows.eos, stack.make_labels),)
            )


def open_folder(directory: Path | str, stack: Any) -> FolderText:
    """Both splits of a folder that `python -m reference.data prepare` made.

    Everything is verified before a window is made: sizes and hashes of all files, the tokenizer,
    that evaluation text is no training text, that the declared mixture can be had. The validation
    split is read under the same policy with tail "pad". Raises DataError (a ValueError) naming what
    is wrong, and ValueError where a split has no target.
    """
    manifest = read_manifest(directory)
    require_uncontaminated(directory, manifest)
    tokenizer = open_tokenizer(Path(directory) / TOKENIZER, manifest.tokenizer.eos)
    if tokenizer.vocabulary_size != manifest.tokenizer.vocabulary_size:
        raise DataError(
            f"{directory}: the tokenizer has {tokenizer.vocabulary_size} ids, the manifest says "
            f"{manifest.tokenizer.vocabulary_size}"
        )
    policy = PackingPolicy.from_json(manifest.policy)
    training = SplitWindows(directory, manifest, TRAIN, policy)
    declared_weights(manifest, training)
    held_out = SplitWindows(directory, manifest, VALIDATION, policy.for_evaluation())
    return FolderText(manifest, tokenizer, training, held_out, stack)


def declared_weights(manifest: Manifest, windows: SplitWindows) -> list[float] | None:
    """The weight of each source that has windows; None if no source declares one.

    Raises DataError if some declare one and some do not, and for one with a weight and no window:
    the mixture would be another than the declared one.
    """
    declared = [source.weight for source in manifest.sources]
    weights = [weight for weight in declared if weight is not None]
    if not weights:
        return None
    if len(weights) < len(declared):
        raise DataError(f"every source declares a weight or none does, got {declared}")
    for number, source in enumerate(manifest.sources):
        if number not in windows.sources:
            raise DataError(
                f"source {source.name} declares weight {source.weight:g}, and has no window of "
                f"{windows.policy.window_tokens} tokens to train on; give more text, a smaller "
                f"window, or prepare without it"
            )
    return [weights[source] for source in windows.sources]


def with_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """The same shape of model, with a row of the embedding for every id of the tokenizer."""
    size = tokenizer.vocabulary_size
    if isinstance(config, DecoderConfig):
        return replace(config, vocabulary_size=size, tokenizer_vocabulary=size)
    return replace(config, vocabulary_size=size)


def require_tokenizer(text: FolderText, tokenizer: Any) -> None:
    """DataError unless a model's tokenizer is the one that made the shards."""
    own = text.manifest.tokenizer.sha256
    if tokenizer.sha256 != own:
        raise DataError(
            f"the model's tokenizer is {tokenizer.sha256[:12]}, the data was made with "
            f"{own[:12]}: they do not belong together; prepare the data with --tokenizer FILE"
        )
