"""Server versions, and which NCCL a server's torch brings.

Source of the pins: wheels of sglang 0.5.9 and 0.5.23, vllm 0.16.0 and 0.33.0 and the torch they ask
for.
"""

import re

from autotune.errors import UserError

Version = tuple[int, ...]

#: engine -> (first server version, NCCL of the torch it pins), oldest first
_NCCL_PINS: dict[str, tuple[tuple[str, str], ...]] = {
    "sglang": (("0.5.9", "2.27.5"), ("0.5.23", "2.30.7")),
    "vllm": (("0.16", "2.27.5"), ("0.33", "2.30.7")),
}


def parse_version(text: str) -> Version:
    """ "0.5.9.post1", "v0.33.0rc1" -> comparable numbers. Raises ``UserError``."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:\.?post(\d+))?", text.strip())
    if match is None:
        raise UserError(f"version {text!r} is no version; write it like 0.5.9")
    numbers = [int(part) for part in match[1].split(".")]
    numbers += [0] * (3 - len(numbers))
    return (*numbers, int(match[2])) if match[2] else tuple(numbers)


def pinned_nccl(engine: str, version: Version | None) -> str | None:
    """NCCL version that exactly this server release brings; None for releases not read."""
    if version is None:
        return None
    for server, nccl in _NCCL_PINS.get(engine, ()):
        pinned = parse_version(server)
        if version[:2] == pinned[:2] and (engine == "vllm" or version[2] == pinned[2]):
            return nccl
    return None
