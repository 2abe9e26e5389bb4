"""The folder in which a preparation works: finished parts stay there if it is killed.

Beside DIR it is called .DIR.prepare-KEY, where KEY names sources, settings and code, but not the
packing policy: what goes on there is the very same preparation, up to the manifest. It is locked
while a process works in it.

What `reading.py`, `clustering.py` and `tokenizing.py` leave there, each writes at its top.
"""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from glob import escape
from multiprocessing import active_children, forkserver, get_context, parent_process
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from reference.checkpoint import disk
from reference.checkpoint.commit import fsync_folder
from reference.checkpoint.temporary import lock, remove

Task = TypeVar("Task")
Result = TypeVar("Result")
_PRELOADED = ["reference.data.tokenizing", "reference.data.checking"]
_THREADS = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class PolicyRefusedError(ValueError):
    """The packing policy does not suit what was prepared, which another policy can go on with."""


def goes_on(error: BaseException) -> bool:
    """Whether a preparation that ended so can be gone on with: not after a refusal of its sources
    or settings, but after all that happens to a process.
    """
    return not isinstance(error, ValueError) or isinstance(error, PolicyRefusedError)


@contextmanager
def working_folder(target: Path, key: str) -> Iterator[Path]:
    """The folder for the preparation `key` of `target`, locked; it stays when the block ends, if
    there is something in it that can be gone on with.

    Raises ValueError if another process works in it.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = work_folder(target, key)
    with suppress(FileExistsError):
        disk.make_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not lock(descriptor):
            raise ValueError(f"another process prepares {target}; it works in {folder}")
        try:
            yield folder
        except BaseException as error:
            if not goes_on(error):
                remove(folder)
            raise
        finally:
            with suppress(OSError):  # it has content, or it is not there any more
                disk.remove_folder(folder)
    finally:
        os.close(descriptor)


def work_folder(target: Path, key: str) -> Path:
    """Where the preparation `key` of `target` works."""
    return target.with_name(f".{target.name}.prepare-{key[:12]}")


def leftovers(target: Path, key: str) -> list[Path]:
    """Folders of preparations of `target` that the one of this key does not go on with: others, or
    its own if `target` is there, which was killed when it had published it.
    """
    return [
        folder
        for folder in sorted(target.parent.glob(f".{escape(target.name)}.prepare-*"))
        if folder.name != work_folder(target, key).name or target.exists()
    ]


class Workers:
    """Runs tasks in `num_workers` processes, results in the order of the tasks; with one worker in
    this process. The results do not depend on the number.

    Raises ValueError for num_workers < 1, RuntimeError when a process dies.
    """

    def __init__(self, num_workers: int) -> None:
        if num_workers < 1:
            raise ValueError(f"workers is {num_workers}, must be at least 1")
        self.num_workers = num_workers

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """function(task) of each task; a few tasks are taken ahead. The processes end with the
        last one: the memory that a stage took is free for the next.
        """
        if self.num_workers == 1:
            yield from map(function, tasks)
            return
        others = set(active_children())
        pool: ProcessPoolExecutor | None = None
        running: list[Future[Result]] = []
        try:
            with _signals_later():  # which are answered here, where the pool is ended
                pool = _pool(self.num_workers)
            for task in tasks:
                running.append(pool.submit(function, task))
                if len(running) > 2 * self.num_workers:
                    yield running.pop(0).result()
            while running:
                yield running.pop(0).result()
        except BrokenProcessPool as error:
            for process in set(active_children()) - others:
                process.kill()  # the pool sends them SIGTERM, which they ignore, and waits for them
            raise RuntimeError(
                "a worker process died, perhaps for want of memory; run the same command again, "
                "with fewer --workers: it goes on where it stopped"
            ) from error
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)


def _pool(num_workers: int) -> ProcessPoolExecutor:
    """Processes forked from one that has imported what they need and has no threads, as this one
    may have; each of them computes with one thread.
    """
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    context = get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    _start_deaf_to_signals()
    try:
        pool = ProcessPoolExecutor(num_workers, context, _end_with_parent)
        for future in [pool.submit(os.getpid) for _ in range(num_workers)]:
            future.result()  # they start now, with these variables
        return pool
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_later() -> Iterator[None]:
    """A signal that would end this process does so behind the block: workers that are just starting
    would each report that what they were to inherit is gone.
    """
    if current_thread() is not main_thread():
        yield  # signals are answered in the main thread alone
        return
    come: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: come.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if come:
        signal.raise_signal(come[0])


def _start_deaf_to_signals() -> None:
    """Starts the process that forks the workers: they inherit that they ignore Ctrl-C and SIGTERM,
    which come to the whole group, and which only this process answers.
    """
    if current_thread() is not main_thread():
        forkserver.ensure_running()
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """This worker ends when the process that started it is killed: else it would wait for ever."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    Thread(target=wait, daemon=True).start()


def write_whole(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """The file appears with all pieces, end to end, or not at all."""
    half = path.with_name(f"{path.name}.half")
    with suppress(FileNotFoundError):
        disk.unlink(half)
    descriptor = disk.create(half)
    try:
        with disk_errors_name(path):
            for piece in pieces:
                rest = memoryview(piece)
                while len(rest):
                    rest = rest[disk.write(descriptor, rest) :]
            disk.fsync(descriptor)
    finally:
        os.close(descriptor)
    disk.rename(half, path)


@contextmanager
def disk_errors_name(path: Path) -> Iterator[None]:
    """An OSError that names no file gets this one: a write to a descriptor does not know it."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def write_table(path: Path, table: pa.Table) -> None:
    """As Parquet, whole or not at all."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    write_whole(path, [memoryview(sink.getvalue())])


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """One row of numbers as .npy, whole or not at all, without a copy of it in memory."""
    header = io.BytesIO()
    npy = np.lib.format
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(array))
    write_whole(path, [header.getbuffer(), array.view(np.uint8).data])


def write_arrays(path: Path, **arrays: npt.NDArray[Any]) -> None:
    """As .npz, whole or not at all."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    write_whole(path, [buffer.getbuffer()])


def publish(folder: Path, target: Path) -> None:
    """Gives a finished folder its name, when everything in it is on the device."""
    for below in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        fsync_folder(below)
    disk.rename(folder, target)
    fsync_folder(target.parent)
