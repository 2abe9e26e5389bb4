"""Checkpoints: a training run at one instant, published whole or not at all, resumed exactly.

`capture` copies, `save` publishes, `latest` finds, `load` refuses or reads, `restore` puts back.
"""

from reference.checkpoint.background import BackgroundSaver
from reference.checkpoint.commit import latest, save
from reference.checkpoint.errors import CheckpointError, MissingRankError
from reference.checkpoint.load import Expected, expected, load, resumption
from reference.checkpoint.state import Snapshot, capture, digests, restore, restore_training
from reference.hf.folder import FolderTakenError

__all__ = [
    "BackgroundSaver",
    "CheckpointError",
    "Expected",
    "FolderTakenError",
    "MissingRankError",
    "Snapshot",
    "capture",
    "digests",
    "expected",
    "latest",
    "load",
    "restore",
    "restore_training",
    "resumption",
    "save",
]
