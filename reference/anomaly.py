"""Updates that went wrong, kept with what is needed to run them again.

An update is an anomaly when its loss or its gradient norm is not finite, when its gradient norm is
more than 10 times the median of the last 50 updates, or when its loss is more than 1 nat per token
above their median; the two medians are asked after 20 updates. Of several ranks each judges what
is of all of them, so that they agree without a word.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from reference.checkpoint import disk
from reference.checkpoint.commit import explained, fsync_folder, write_file
from reference.checkpoint.peers import peers_of
from reference.checkpoint.state import Snapshot, canonical_json
from reference.checkpoint.temporary import remove_leftovers, temporary_folder
from reference.checkpoint.tensors import sha256, stream
from reference.checkpoint.write import digests_over_ranks
from reference.hf.folder import refuse_content
from reference.hf.shards import read_json
from reference.update import TrainState, WindowStats
from reference.window import Microbatch, Window

NUM_REMEMBERED, NUM_NEEDED = 50, 20  # updates
NORM_FACTOR, LOSS_RISE_NATS = 10.0, 1.0
NOT_FINITE, OUTLYING = "not finite", "outlying"
REPORT = "anomaly.json"
_PARTS = ("input_ids", "labels", "positions", "documents")


@dataclass(frozen=True)
class Anomaly:
    """What was seen: kind is `NOT_FINITE` or `OUTLYING`, reason a sentence."""

    kind: str
    reason: str
    loss_nats: float
    grad_norm: float


@dataclass(frozen=True)
class Kept:
    """What a folder of `keep` says: the anomaly; config and settings of the state before the
    update, as in Snapshot; digests of its parts, as in the manifest of its checkpoint; the window,
    on the CPU, the microbatches of all ranks in rank order; how many each rank has of them.
    """

    anomaly: Anomaly
    config: dict[str, Any]
    settings: dict[str, Any]
    digests: dict[str, str]
    window: Window
    num_microbatches: tuple[int, ...]


@dataclass
class Rule:
    """The rule above, with the losses and norms that it remembers. A resumed run starts anew."""

    losses_nats: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))

    def judge(self, loss_nats: float, grad_norm: float) -> Anomaly | None:
        """The anomaly that these are, or None. They are remembered where they are finite."""
        if not (math.isfinite(loss_nats) and math.isfinite(grad_norm)):
            reason = f"loss {loss_nats} nats per token, gradient norm {grad_norm}"
            return Anomaly(NOT_FINITE, reason, loss_nats, grad_norm)
        reason = self._outlying(loss_nats, grad_norm)
        self.losses_nats.append(loss_nats)
        self.norms.append(grad_norm)
        return Anomaly(OUTLYING, reason, loss_nats, grad_norm) if reason else None

    def _outlying(self, loss_nats: float, grad_norm: float) -> str:
        if len(self.norms) < NUM_NEEDED:
            return ""
        usual_norm, usual_loss_nats = median(self.norms), median(self.losses_nats)
        if grad_norm > NORM_FACTOR * usual_norm:
            return (
                f"gradient norm {grad_norm:.4g}, {NORM_FACTOR:g} times the median {usual_norm:.4g}"
            )
        if loss_nats > usual_loss_nats + LOSS_RISE_NATS:
            return (
                f"loss {loss_nats:.4f} nats per token, {LOSS_RISE_NATS:g} above the median "
                f"{usual_loss_nats:.4f}"
            )
        return ""


class AnomalyWatch:
    """A stack that behaves like `stack` and looks at each update between its gradient and its step.

    There the loss and the norm are known and the state is still that from before: nothing is
    copied unless the update is an anomaly. The first of each kind is kept, in
    `directory`/anomaly-<updates applied before>, with `keep`; a folder that is there stays.

    training: what the updates change. snapshot, random_state: what makes one of the state, and of
    the generators, as they are. An update_window that does not call `accumulate` and
    `clip_grad_norm` of the stack it is given is not watched.

    Several ranks watch together, each its share of the window, and keep one folder. They come to
    one judgement without a word, because the loss and the norm are those of all ranks: the same to
    the last bit, as `clip_grad_norm` has to give them.
    """

    def __init__(
        self,
        stack: Any,
        training: TrainState,
        directory: Path,
        snapshot: Callable[[], Snapshot],
        random_state: Callable[[], dict[str, Tensor]],
    ) -> None:
        self._stack, self._training, self._directory = stack, training, directory
        self._snapshot, self._random_state = snapshot, random_state
        self._rule, self._kinds_kept = Rule(), set[str]()
        self._window: Window | None = None
        self._loss_nats = math.nan
        self._random: dict[str, Tensor] = {}

    def __getattr__(self, role: str) -> Any:
        return getattr(self._stack, role)

    def accumulate(
        self, model: Any, window: Window, group: Any, loss_scale: float = 1.0
    ) -> WindowStats:
        """As the stack's; the window, the random state before and the loss are remembered."""
        self._window, self._random = window, self._random_state()
        stats: WindowStats = self._stack.accumulate(model, window, group, loss_scale)
        self._loss_nats = stats.nll_sum / stats.num_targets if stats.num_targets else math.nan
        return stats

    def clip_grad_norm(
        self, parameters: Any, max_norm: float, group: Any, norm_type: float = 2.0
    ) -> Tensor:
        """As the stack's; then the update is judged."""
        norm: Tensor = self._stack.clip_grad_norm(parameters, max_norm, group, norm_type)
        anomaly = self._rule.judge(self._loss_nats, float(norm))
        if anomaly and self._window and anomaly.kind not in self._kinds_kept:
            self._kinds_kept.add(anomaly.kind)
            self._keep(anomaly, self._window)
        return norm

    def _keep(self, anomaly: Anomaly, window: Window) -> None:
        step = self._training.counters.optimizer_steps
        directory = self._directory / f"anomaly-{step:08d}"
        peers = peers_of(self._training.group)
        if not peers.first(f"look for {directory}", directory.exists):
            captured: list[Snapshot] = []
            peers.agree(f"capture for {directory}", lambda: captured.append(self._snapshot()))
            before = replace(captured[0], random=self._random)
            keep(directory, before, window, anomaly, self._stack.save)


def keep(
    directory: Path, before: Snapshot, window: Window, anomaly: Anomaly, save: Callable[..., Any]
) -> None:
    """Writes a checkpoint of the state before the update, the window, and what was seen.

    `directory` appears when it is whole. All ranks of `before.peers` call together, each with its
    share of the window, and return when it is there.

    Raises FolderTakenError if it has content, OSError saying what could not be done if the disk is
    full or read-only, and as `save`; then nothing is there. Over several ranks the same on all.
    """
    peers = before.peers
    with explained(f"cannot keep {directory}"), ExitStack() as until_renamed:

        def begin() -> str:
            directory.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(directory.parent)
            refuse_content(directory)
            return until_renamed.enter_context(temporary_folder(directory)).name

        folder = directory.parent / peers.first(f"begin {directory}", begin)
        # Not what `save` says of itself: replay compares the two.
        digests = digests_over_ranks(before)
        save(folder, before, 1, 0)
        file = folder / _window_file(peers.index, peers.world_size)
        windows = peers.agree(f"write the window in {folder}", lambda: _write_window(file, window))
        report = {
            **asdict(anomaly),
            "loss_nats": repr(anomaly.loss_nats),  # JSON has no nan
            "grad_norm": repr(anomaly.grad_norm),
            "config": before.config,
            "settings": before.settings,
            "digests": digests,
            "windows": windows,
        }
        peers.first(f"publish {directory}", lambda: _publish(folder, directory, report))


def _window_file(rank: int, world_size: int) -> str:
    of = "" if world_size == 1 else f"-{rank:05d}-of-{world_size:05d}"
    return f"window{of}.safetensors"


def _write_window(file: Path, window: Window) -> str:
    """The SHA-256 of what was written. Rows that stand in are left out: another rank has them."""
    read = [microbatch for microbatch in window.microbatches if not microbatch.is_stand_in]
    tensors = {
        f"{index}.{part}": tensor
        for index, microbatch in enumerate(read)
        for part in _PARTS
        if (tensor := getattr(microbatch, part)) is not None
    }
    return write_file(file, stream(tensors)).sha256


def _publish(folder: Path, directory: Path, report: dict[str, Any]) -> None:
    write_file(folder / REPORT, [canonical_json(report)])
    fsync_folder(folder)
    refuse_content(directory)
    disk.rename(folder, directory)
    fsync_folder(directory.parent)


def read(directory: Path) -> Kept:
    """What `keep` wrote, but for the checkpoint; ValueError if `directory` is no kept anomaly.

    Also where the window of a rank is missing or is not the one that was kept.
    """
    from safetensors import SafetensorError

    report = read_json(directory / REPORT)
    try:
        numbers = {name: float(report[name]) for name in ("loss_nats", "grad_norm")}
        anomaly = Anomaly(report["kind"], report["reason"], **numbers)
        by_rank = _read_windows(directory, report["windows"])
        described = {part: dict(report[part]) for part in ("config", "settings", "digests")}
        window = Window(tuple(microbatch for rank in by_rank for microbatch in rank))
        return Kept(anomaly, **described, window=window, num_microbatches=tuple(map(len, by_rank)))
    except (KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        raise ValueError(f"{directory} is no kept anomaly: {error!r}") from error


def _read_windows(directory: Path, digests: Sequence[str]) -> list[list[Microbatch]]:
    """The microbatches of every rank, in rank order."""
    from safetensors.torch import load

    by_rank = []
    for rank, digest in enumerate(digests):
        name = _window_file(rank, len(digests))
        content = (directory / name).read_bytes()
        if sha256([content]) != digest:
            raise ValueError(f"{directory} is no kept anomaly: {name} was changed")
        tensors = load(content)
        by_rank.append(
            [
                Microbatch(*(tensors.get(f"{index}.{part}") for part in _PARTS))  # type: ignore[arg-type]
                for index in range(len({key.partition(".")[0] for key in tensors}))
            ]
        )
    return by_rank
