"""Candidates: the roles that ``--candidate`` puts into the reference stack."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from harness.contract import Role, Stack
from harness.devices import DTYPES, HALF, Device, find, force_numerics

Origin = dict[str, Any]  # role, module, version, file and hashes, as the evidence keeps them


def load_reference(name: str) -> Stack:
    """The reference stack: the roles of the module ``name``."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise pytest.UsageError(f"touchstone_reference = {name}: cannot import it: {error}") from (
            error
        )
    return Stack(_roles(module, name))


def load_candidates(
    names: Iterable[str], reference: Stack, kind: str
) -> tuple[Stack, dict[str, ModuleType]]:
    """The reference stack with every candidate's roles put in, and the module of each of them.

    A candidate may declare ``DTYPES = {"cpu": (torch.float32,), …}`` beside its roles; the stack's
    ``dtypes`` are those of the device ``kind`` that every candidate declares. One without it takes
    them all.

    Raises:
        pytest.UsageError: a candidate that does not import, has no ``ROLES``, names an unknown
            role or one that another candidate brought, takes other arguments, declares
            dtypes that are none, or none for this kind of device.
    """
    stack, modules = Stack(reference.roles, DTYPES[kind]), dict[str, ModuleType]()
    for name in names:
        module = _import(name)
        roles = _roles(module, name)
        for role, function in roles.items():
            if role not in reference.roles:
                known = ", ".join(sorted(reference.roles))
                raise pytest.UsageError(
                    f"--candidate {name}: unknown role {role!r}; the roles are {known}"
                )
            if role in modules:
                raise pytest.UsageError(
                    f"--candidate {name}: the role {role!r} was already brought by another "
                    "candidate; put one implementation of a role on trial at a time"
                )
            _check_signature(name, role, function, reference.roles[role])
            modules[role] = module
        declared = _dtypes(module, name, kind)
        common = tuple(dtype for dtype in stack.dtypes if dtype in declared)
        if not common:
            raise pytest.UsageError(f"--candidate {name}: no dtype that all candidates take; it "
                                    f"takes {declared}, the others {stack.dtypes}")  # fmt: skip
        stack = Stack({**stack.roles, **roles}, common)
    return stack, modules


def _dtypes(module: ModuleType, name: str, kind: str) -> tuple[torch.dtype, ...]:
    """The dtypes that a candidate declares for a kind of device; all if it declares nothing."""
    declared = getattr(module, "DTYPES", None)
    if declared is None:
        return DTYPES[kind]
    taken = declared.get(kind, ()) if isinstance(declared, dict) else ()
    if isinstance(declared, dict) and declared and kind not in declared:
        raise pytest.UsageError(
            f"--candidate {name}: it runs on {', '.join(map(str, declared))} by its DTYPES, not on "
            f"{kind}; choose another --device"
        )
    if not (isinstance(taken, tuple) and taken and set(taken) <= set(DTYPES[kind])):
        known = ", ".join(map(str, DTYPES[kind]))
        raise pytest.UsageError(
            f"--candidate {name}: DTYPES must be a dict from device kinds to tuples of dtypes, "
            f"with at least one of {known} for {kind!r}; it is {declared!r}"
        )
    return taken


def _import(name: str) -> ModuleType:
    """``candidates.<name>`` if there is such a module, else the module ``name``."""
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise pytest.UsageError(
            f"--candidate {name}: give an importable module such as their.module, not a file"
        )
    try:
        full = f"candidates.{name}" if _exists(f"candidates.{name}") else name
        return importlib.import_module(full)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # its own code may raise anything, SystemExit and skips too
        raise pytest.UsageError(
            f"--candidate {name}: cannot import it: {type(error).__name__}: {error}"
        ) from error


def _exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name and name.startswith(error.name):  # one of its packages is not there
            return False
        raise


def _roles(module: ModuleType, name: str) -> dict[str, Role]:
    roles = getattr(module, "ROLES", None)
    if not isinstance(roles, dict) or not roles or not all(map(callable, roles.values())):
        raise pytest.UsageError(
            f"{name} must define ROLES, a dict from role names to functions, such as "
            f'ROLES = {{"rms_norm": rms_norm}}; it has {roles!r}'
        )
    return roles


def _check_signature(name: str, role: str, function: Role, reference: Role) -> None:
    """The candidate must accept the positional arguments that the reference takes."""
    wanted = inspect.signature(reference)
    try:
        signature = inspect.signature(function)
        signature.bind(*wanted.parameters)
    except TypeError as error:
        raise pytest.UsageError(
            f"--candidate {name}: {role}{signature} cannot be called as {role}{wanted}: {error}"
        ) from error
    except ValueError as error:
        raise pytest.UsageError(
            f"--candidate {name}: {role} has no signature that Python can read; wrap it in a "
            f"function {role}{wanted}"
        ) from error


def _origin(role: str, module: ModuleType) -> Origin:
    file = getattr(module, "__file__", None)
    return {
        "role": role,
        "module": module.__name__,
        "version": _version(module),
        "file": file,
        "sha256": _hash([file]) if file else None,
        "package_sha256": _hash(_files_of_package(module)),
    }


def _hash(files: Iterable[str]) -> str:
    """SHA-256 over the contents of the files, one after the other."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(Path(file).read_bytes())
    return digest.hexdigest()


def _files_of_package(module: ModuleType) -> list[str]:
    """The files of every loaded module of the candidate's package: a role may live in any."""
    package = module.__name__.partition(".")[0]
    files = {
        getattr(loaded, "__file__", None)
        for name, loaded in list(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
    }
    return sorted(file for file in files if file and Path(file).is_file())


def _version(module: ModuleType) -> str | None:
    package = module.__name__.partition(".")[0]
    declared = getattr(module, "__version__", None)
    if declared is not None:
        return str(declared)
    distributions = importlib.metadata.packages_distributions().get(package)
    return importlib.metadata.version(distributions[0]) if distributions else None


@dataclass(frozen=True)
class Trial:
    """What is on trial in this run, and what it is held against."""

    reference: Stack
    stack: Stack
    origins: list[Origin]
    device: Device
    flags: dict[str, str]


def load_trial(config: pytest.Config) -> Trial:
    """Load the reference and the candidates, find the device and force the numerics flags."""
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:  # a candidate in the current folder, as `python -m` would find it
        sys.path.insert(0, folder)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT") or 0)
    workers = workers or int(getattr(config.option, "numprocesses", None) or 0)
    if workers:  # they share the cores instead of each asking for all of them
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    kind = config.getoption("--device")
    reference, stack, modules = load_stacks(
        config.getini("touchstone_reference"), config.getoption("--candidate"), kind
    )
    origins = [_origin(role, module) for role, module in modules.items()]
    device = find(kind)
    return Trial(reference, stack, origins, device, force_numerics(device))


def load_stacks(
    reference_name: str, candidates: Iterable[str], kind: str
) -> tuple[Stack, Stack, dict[str, ModuleType]]:
    """The reference as variants stand on it, the stack on trial, and its roles' modules."""
    reference = load_reference(reference_name)
    stack, modules = load_candidates(candidates, reference, kind)
    # The variants are asked for the dtypes of the candidates: what is shown to be caught is
    # caught at the precision at which the candidates were judged. What is wrong in 16 bits alone
    # can be caught in 16 bits alone.
    half = () if set(stack.dtypes) & set(HALF) else tuple(d for d in DTYPES[kind] if d in HALF)
    return Stack(reference.roles, (*stack.dtypes, *half)), stack, modules


def noting(stack: Stack, roles: Iterable[str], note: Callable[[str], object]) -> dict[str, Role]:
    """The ``roles`` of a stack, each giving its name to ``note`` before it runs."""

    def noted(role: str, function: Role) -> Role:
        @functools.wraps(function)
        def note_and_call(*arguments: Any, **keywords: Any) -> Any:
            note(role)
            return function(*arguments, **keywords)

        return note_and_call

    return {role: noted(role, stack.roles[role]) for role in roles}
