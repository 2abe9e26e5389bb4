"""Labels that are no token of the vocabulary, found without waiting for the device."""

import torch
from torch import Tensor

NO_TARGET = -100


class LabelCheck:
    """Asks the device whether each label is NO_TARGET or in [0, V), and hears the answer later."""

    def __init__(self, labels: Tensor, vocabulary: int) -> None:
        self.labels, self.vocabulary = labels, vocabulary
        self.wrong = (labels != NO_TARGET) & ((labels < 0) | (labels >= vocabulary))
        # Into pinned memory: a copy into any other waits until the device has come here.
        self.some_wrong = torch.empty((), dtype=torch.bool, pin_memory=labels.is_cuda)
        self.some_wrong.copy_(self.wrong.any(), non_blocking=True)
        self.answered = torch.cuda.Event() if labels.is_cuda else None
        if self.answered:
            self.answered.record(torch.cuda.current_stream(labels.device))

    def raise_if_wrong(self) -> None:
        """Raises ValueError with the first wrong label.

        The device works on at what was queued behind the question while this waits.
        """
        if self.answered:
            self.answered.synchronize()
        if bool(self.some_wrong):
            raise ValueError(
                f"a label must be {NO_TARGET} (no target) or in [0, {self.vocabulary}), got "
                f"{int(self.labels[self.wrong][0])}; check the tokenizer's vocabulary"
            )
