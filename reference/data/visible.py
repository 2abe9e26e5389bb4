"""Text and names from data, as a terminal may have them."""

import re

# C0, DEL and C1; the controls of writing direction; halves of surrogate pairs, which no UTF-8 has.
_HIDDEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str, keep: str = "") -> str:
    """The text with each control character spelled as in Python: ESC as \\x1b, U+202E as \\u202e.

    keep: those that the layout needs, such as the line ends of a document. Nothing else is changed,
    also no backslash: the result is to be read, and not to be decoded.
    """
    return _HIDDEN.sub(lambda found: found[0] if found[0] in keep else _spelled(found[0]), text)


def drawable(name: str) -> str:
    """The name as matplotlib draws it, to which dollars mean a formula."""
    return visible(name).replace("$", r"\$")


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
