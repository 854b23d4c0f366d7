"""Python-like text in server logs: ``Name(a=1, b='x')`` and ``{'a': 1}`` to plain values.

Logs hold values that are no Python literals (``torch.bfloat16``, nested objects); those stay text.
"""

import ast
from typing import Any

_OPEN, _CLOSE = "([{", ")]}"


def keyword_values(text: str) -> dict[str, Any]:
    """Values of ``a=1, b='x, y', c=Thing(d=2)`` by name; a cut-off last value is left out."""
    found: dict[str, Any] = {}
    for part, complete in _split(text):
        name, equals, value = part.partition("=")
        name = name.strip()
        if equals and name.isidentifier() and complete:
            found[name] = literal(value.strip())
    return found


def literal(text: str) -> Any:
    """A Python literal, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def balanced(text: str, start: int) -> tuple[str, bool]:
    """What stands between the bracket at ``start`` and its partner; False when it is cut off."""
    depth, quote, index = 0, "", start
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
            if depth == 0:
                return text[start + 1 : index], True
        index += 1
    return text[start + 1 :], False


def _split(text: str) -> list[tuple[str, bool]]:
    """Parts between commas outside brackets and quotes; the last is complete if it closes."""
    parts: list[tuple[str, bool]] = []
    depth, quote, begin, index = 0, "", 0, 0
    while index < len(text):
        char = text[index]
        if quote:
            if char == "\\":
                index += 1
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in _OPEN:
            depth += 1
        elif char in _CLOSE:
            depth -= 1
        elif char == "," and depth == 0:
            parts.append((text[begin:index], True))
            begin = index + 1
        index += 1
    parts.append((text[begin:], depth == 0 and not quote))
    return parts
