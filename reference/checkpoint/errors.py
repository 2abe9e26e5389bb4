"""What a checkpoint is refused with, and what a save over ranks is given up with."""


class CheckpointError(ValueError):
    """A folder is no checkpoint, or not the one that was expected; one sentence says why."""


class MissingRankError(TimeoutError):
    """Some ranks did not take part in time; the sentence names them."""
