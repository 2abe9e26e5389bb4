"""Texts on which tokenizers go wrong, and a little text to make one from."""

from __future__ import annotations

TRAINING = [
    b"The tokenizer is trained on the training side only, never on what is held out.\n" * 3,
    b"def train(texts, size):\n    for text in texts:\n        yield text.encode('utf-8')\n" * 4,
    "Straße, naïve, 東京, Привет, שלום: the same words come again and again.\n".encode() * 3,
    b"0 1 2 3 10 11 12 100 1000 10000 the end of the training text, the end\n" * 3,
]
KNOWN = "abcdefghij klmnopqrstuvwxyzABC .,\n\t\x00\u00e9\u6771\U0001d518"

ODD_TEXTS = {
    "nothing": b"",
    "white space at both ends": b"  \t a line \n\n ",
    "carriage returns": b"one\r\ntwo\rthree\n",
    "control characters": bytes(range(32)) + b"\x7f",
    "a byte order mark": "\ufefftext".encode(),
    "composed and decomposed": "é e\u0301 Å A\u030a ﬁ".encode(),
    "joined and directed": "👩\u200d👩\u200d👧 \u202eabc\u202c न\u094dदी".encode(),
    "spaces of other kinds": "a\u00a0b\u3000c\u2028d\u0085e".encode(),
    "the last code points": "\uffff \U0010ffff \ufffd".encode(),
    "upper and lower case": "İstanbul ISTANBUL \u0131stanbul ß ẞ".encode(),
    "a long run": b"a" * 5_000 + b" " * 5_000 + b"\n" * 500,
    "a long word": ("ab" * 3_000).encode(),
}
