"""What is done to a document before it is hashed: as little as can be, each step by its name."""

from __future__ import annotations

from dataclasses import dataclass

EMPTY, INVALID, TOO_LONG = "empty", "invalid UTF-8", "too long"
EXACT, NEAR = "exact duplicate", "near duplicate"
REASONS = (EMPTY, INVALID, TOO_LONG, EXACT, NEAR)
BYTE_ORDER_MARK, LINE_ENDS = "byte order mark removed", "line ends CR LF to LF"
_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class CleanSettings:
    """max_document_bytes: a longer text file is cut before, any other longer document is dropped;
    refuse_invalid: UTF-8 that is invalid is an error, and not a reason to drop the document.
    """

    max_document_bytes: int = 16 * 2**20
    refuse_invalid: bool = False


@dataclass(frozen=True)
class Cleaned:
    """dropped: the reason, None if the document stays; steps: what changed it."""

    text: bytes
    steps: tuple[str, ...] = ()
    dropped: str | None = None


def clean(raw: bytes, settings: CleanSettings) -> Cleaned:
    """Drops text that is empty (white space alone), too long or no UTF-8; removes a byte order mark
    at its start, and makes LF of CR LF. Nothing else is changed.

    Raises ValueError, without the document's name, for invalid UTF-8 if that is to be refused.
    """
    if len(raw) > settings.max_document_bytes:
        return Cleaned(b"", dropped=TOO_LONG)
    text, steps = raw, []
    if text.startswith(_MARK):
        text = text.removeprefix(_MARK)
        steps.append(BYTE_ORDER_MARK)
    if b"\r\n" in text:
        text = text.replace(b"\r\n", b"\n")
        steps.append(LINE_ENDS)
    if not text.strip():
        return Cleaned(b"", dropped=EMPTY)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        if settings.refuse_invalid:
            byte = text[error.start]
            raise ValueError(f"byte {error.start} (0x{byte:02x}) is no UTF-8") from error
        return Cleaned(b"", dropped=INVALID)
    return Cleaned(text, tuple(steps))
