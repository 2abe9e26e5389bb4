"""What a checkpoint is refused with."""


class CheckpointError(ValueError):
    """A folder is no checkpoint, or not the one that was expected; one sentence says why."""
