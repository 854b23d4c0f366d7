"""Takes NCCL's own line out of what collectors of logs put around it.

Terminal colours (docker compose, Ray, loguru), JSON with the line in one of its values (docker's
json-file, cloud logging), and Ray's remark that it left equal lines of other workers out. A prefix
of plain text needs no care: the reader looks for "host:pid:tid [device]".
"""

import json
import re

_COLOUR = re.compile(rb"\x1b\[[0-9;:?]*[ -/]*[@-~]")
_FOLDED = re.compile(rb"\s*\[repeated (\d{1,6})x across cluster\].*$")
_FOLDED_MARK = b"[repeated "


def wrapped(line: bytes) -> bool:
    """Whether ``unwrap`` would change a line; cheap."""
    return b"\x1b" in line or _FOLDED_MARK in line or line[:1] == b"{"


def unwrap(line: bytes) -> tuple[bytes, int]:
    """(NCCL's line, number of equal lines of other processes that were left out)."""
    if line[:1] == b"{":
        line = _from_json(line)
    if b"\x1b" in line:
        line = _COLOUR.sub(b"", line)
    if _FOLDED_MARK in line:
        match = _FOLDED.search(line)
        if match is not None:
            return line[: match.start()], int(match[1])
    return line, 0


def _from_json(line: bytes) -> bytes:
    """The value that holds the message; the line itself where it is no JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return line
    found = _message(value, depth=0)
    return line if found is None else found.rstrip("\r\n").encode("utf-8", "replace")


def _message(value: object, depth: int) -> str | None:
    if isinstance(value, dict) and depth < 3:
        for name in ("log", "message", "msg", "line", "textPayload", "body", "text"):
            if isinstance(value.get(name), str):
                return str(value[name])
        for inner in value.values():
            found = _message(inner, depth + 1)
            if found is not None:
                return found
    return None
