"""The hash chain of ``evidence.jsonl``: one canonical JSON object a line.

    previous_i = hash_(i-1), previous_0 = 64 zeros
    hash_i     = sha256(canonical(body_i)), the body without its "hash"

Canonical: sorted keys, no spaces, ASCII, one line; a float that JSON cannot hold is
{"float": "nan"}, {"float": "inf"} or {"float": "-inf"}. A line that is not its own canonical form
counts as changed. The chain shows any change but one: lines cut off at the end, which the number of
lines and the last hash in ``report.json`` show.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

GENESIS = "0" * 64
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def canonical(value: Any) -> str:
    """The canonical JSON of ``value``; ValueError as ``encode``."""
    return json.dumps(
        encode(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def seal(record: dict[str, Any], index: int, previous: str) -> dict[str, Any]:
    """The record with its place in the chain and its hash.

    Raises:
        ValueError: the record already uses a name that the chain needs, or is no JSON.
    """
    taken = {"index", "previous", "hash"} & set(record)
    if taken:
        raise ValueError(f"a record may not hold {sorted(taken)}; the chain writes these")
    body = {**record, "index": index, "previous": previous}
    return {**body, "hash": _hash(body)}


def decode(line: bytes) -> dict[str, Any]:
    """The object on a line, its floats restored.

    Raises:
        ValueError: not one JSON object.
    """
    try:
        value = json.loads(line.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    decoded: dict[str, Any] = _decode(value)
    return decoded


def first_problem(lines: Sequence[bytes]) -> str:
    """One sentence on the first line that was changed, removed, added or moved; empty if none.

    ``lines`` keep their ends, as ``readlines`` gives them.
    """
    opened = [_open(line) for line in lines]
    bodies = [body for body, _ in opened]
    expected = GENESIS
    for position, (body, fault) in enumerate(opened):
        if body is None:
            follower = bodies[position + 1] if position + 1 < len(lines) else None
            was = "added" if follower and follower["index"] == position else "changed"
            return f"Line {position + 1} was {was}: {fault}."
        if body["index"] != position or body["previous"] != expected:
            return _link_problem(bodies, position, body)
        expected = body["hash"]
    return ""


def _open(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """A line's object and what is wrong with the line by itself."""
    if not line.endswith(b"\n"):
        return None, "it is cut short"
    try:
        body = decode(line)
        is_canonical = canonical(body).encode() + b"\n" == line
    except ValueError as error:
        return None, str(error)
    index = body.get("index")
    if not (isinstance(index, int) and index >= 0 and isinstance(body.get("previous"), str)):
        return None, "it has no place in the chain"
    if body.get("hash") != _hash({key: body[key] for key in body if key != "hash"}):
        return None, "its content does not have the hash that it states"
    return (body, "") if is_canonical else (None, "it is not in the form in which it was written")


def _link_problem(
    bodies: Sequence[dict[str, Any] | None], position: int, body: dict[str, Any]
) -> str:
    """A sentence on a line that is sound by itself and does not follow the one before it."""
    number, index = position + 1, body["index"]
    if index == position:
        return (
            f"Line {max(number - 1, 1)} was changed and hashed again: line {number} was written "
            "after another one."
        )
    if index > position:
        if any(later and later["index"] == position for later in bodies[number:]):
            return f"Lines were reordered: line {number} was written as line {index + 1}."
        return f"Line {number} was removed: the one now in its place was line {index + 1}."
    copied = bodies[index]
    if copied and copied["hash"] == body["hash"]:
        return f"Line {number} was added: it is a copy of line {index + 1}."
    return f"Line {number - 1} was added: line {number} was written as line {index + 1}."


def _hash(body: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(body).encode()).hexdigest()


def encode(value: Any) -> Any:
    """``value`` with every float that JSON cannot hold as an object.

    Raises:
        ValueError: something that is no JSON: a key that is no string, a tensor, a path.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"the keys of a record are strings; got {list(value)}")
        return {key: encode(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(entry) for entry in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    raise ValueError(f"a record holds JSON; got {type(value).__name__} {value!r}")


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if list(value) == ["float"] and isinstance(value["float"], str):
            return _NOT_FINITE.get(value["float"], value)
        return {key: _decode(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_decode(entry) for entry in value]
    return value
