"""The options of the training command that decide what a run is, as its checkpoints keep them: a
resume that is refused names those that differ.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reference.checkpoint.files import read_manifest, read_state
from reference.checkpoint.load import LocalFolder

OPTIONS = "options"  # the key in a checkpoint's identity
# In the order in which they are named. The first four fix schedule, order and settings of the
# updates; device, ranks and places may be others in a resumed run.
KEPT = (
    "updates", "learning_rate", "seed", "compute_dtype",
    "lora_rank", "lora_alpha", "init", "preset",
    "data", "corpus", "corpus_bytes", "row_tokens",
)  # fmt: skip


def kept_options(options: argparse.Namespace, learning_rate: float) -> str:
    """{"--updates": "300", …} as JSON, None of an option that was not given. learning_rate: that of
    the run, whose default depends on what it starts from.
    """
    given = {**vars(options), "learning_rate": learning_rate}
    values = {name: None if given[name] is None else str(given[name]) for name in KEPT}
    return json.dumps({_spelled(name): value for name, value in values.items()})


@contextmanager
def named_options(checkpoint: Path, ours: str | None) -> Iterator[None]:
    """A ValueError that refuses `checkpoint` names the options that differ, with both values, if
    there are any. What they are does not decide: another path to the same data is no other run.

    ours: as kept_options has them; None, here or in the checkpoint: the error stays as it is.
    """
    try:
        yield
    except ValueError as error:
        if found := _different(_values(_saved(checkpoint)), _values(ours)):
            raise ValueError(
                f"{error}; of the options differ: {'; '.join(found)}; give them as saved, or "
                "choose another directory"
            ) from error
        raise


def _saved(checkpoint: Path) -> object:
    """The options in the checkpoint; None if it has none or cannot be read."""
    source = LocalFolder(checkpoint)
    try:
        return read_state(source, read_manifest(source))["identity"].get(OPTIONS)
    except (ValueError, OSError):  # which the error that is on its way says
        return None


def _values(kept: object) -> dict[str, str | None]:
    """What kept_options wrote; nothing of anything else, which another program may keep."""
    try:
        values = json.loads(kept) if isinstance(kept, str) else None
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _different(before: dict[str, str | None], now: dict[str, str | None]) -> list[str]:
    return [
        f"{option} {before[option] or 'not given'} as saved, {value or 'not given'} now"
        for option, value in now.items()
        if option in before and before[option] != value
    ]


def _spelled(name: str) -> str:
    return "--" + name.replace("_", "-")
