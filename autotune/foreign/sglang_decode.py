"""The one reader of SGLang's decode lines, for lint and for foreign runs alike.

Line forms of sglang 0.5.9 to 0.5.23: "Decode batch, #running-req: 1, ..., accept len: 2.10, ...,
cuda graph: True, gen throughput (token/s): 101.3, ...".
"""

import re
from dataclasses import dataclass

MARK = "Decode batch"
_FIELD = re.compile(
    r"(#running-req|accept len|cuda graph|gen throughput \(token/s\)): ([A-Za-z0-9.+-]+)"
)


@dataclass(frozen=True, slots=True)
class DecodeLine:
    """One decode line; None for what it does not say."""

    running: int
    accept_length: float | None
    cuda_graph: bool | None
    tokens_per_s: float | None


def read_decode_line(line: str) -> DecodeLine | None:
    """What a decode line says; None for another line, and for one cut off before the batch."""
    start = line.find(MARK)
    if start < 0:
        return None
    fields = dict(_FIELD.findall(line, start))
    running = fields.get("#running-req", "")
    if not running.isdecimal():
        return None
    return DecodeLine(
        running=int(running),
        accept_length=_number(fields.get("accept len")),
        cuda_graph={"True": True, "False": False}.get(fields.get("cuda graph", "")),
        tokens_per_s=_number(fields.get("gen throughput (token/s)")),
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
