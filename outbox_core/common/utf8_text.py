"""Text from elsewhere, made such that it can be written as UTF-8."""

from __future__ import annotations


def utf8_text(text: str) -> str:
    """Returns the text with its lone surrogates escaped: they have no UTF-8, and neither databases nor brokers take
    them.
    """
    return text.encode(errors="backslashreplace").decode()
