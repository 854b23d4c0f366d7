"""What each knob of a study's ``space`` may be: type, choices, and the text forms people write.

A knob is written as one value, a list of values, or a range: ``{int: [1, 6]}`` (both ends
included, optional ``step``).
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from model.spec import KNOB_FIELDS, Scalar

#: prefixes of knobs that only one backend knows; their values are not checked here
BACKEND_PREFIXES = ("sglang", "vllm", "engine", "sim")

_SIZE = re.compile(r"^(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|KB|MB|GB)$")
_SIZE_UNITS = {
    "B": 1,
    "KiB": 1 << 10,
    "MiB": 1 << 20,
    "GiB": 1 << 30,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
}


@dataclass(frozen=True)
class KnobType:
    """Values one knob takes: ``choices``, or integers of at least ``low``."""

    choices: tuple[Scalar, ...] = ()
    #: smallest integer; None when the knob is no number
    low: int | None = None
    #: "auto": the library behind it decides
    auto: bool = False
    #: accepts "16MiB" as well as bytes
    size: bool = False

    def allowed(self) -> str:
        """What may be written, for a message."""
        if self.choices:
            return ", ".join(_shown(choice) for choice in self.choices)
        text = f"an integer >= {self.low}"
        if self.size:
            text = f"a size such as 16MiB (or bytes, >= {self.low})"
        return ("auto or " if self.auto else "") + text

    def parse(self, value: object) -> Scalar:
        """``value`` in the type of the knob; raises ``ValueError`` with what is allowed."""
        if self.choices:
            for choice in self.choices:
                if type(value) is type(choice) and value == choice:
                    return choice
            raise ValueError(f"{value!r} is not allowed; allowed: {self.allowed()}")
        if self.auto and value == "auto":
            return "auto"
        number = value
        if self.size and isinstance(value, str):
            match = _SIZE.match(value)
            if match:
                number = round(float(match[1]) * _SIZE_UNITS[match[2]])
        if type(number) is not int or self.low is None or number < self.low:
            raise ValueError(f"{value!r} is not allowed; allowed: {self.allowed()}")
        return number


_FLAG = KnobType(choices=(False, True))
_COUNT = KnobType(low=1)
_AUTO_COUNT = KnobType(low=1, auto=True)

KNOB_TYPES: Mapping[str, KnobType] = {
    "speculation.method": KnobType(choices=("off", "eagle3")),
    "speculation.steps": _COUNT,
    "speculation.topk": _COUNT,
    "speculation.draft_tokens": KnobType(low=2),
    "parallel.tp": _COUNT,
    "collectives.backend": KnobType(
        choices=("nccl", "gloo", "one_shot", "two_shot", "symmetric", "auto")
    ),
    "nccl.algo": KnobType(choices=("auto", "ring", "tree")),
    "nccl.proto": KnobType(choices=("auto", "LL", "LL128", "Simple")),
    "nccl.min_channels": _AUTO_COUNT,
    "nccl.max_channels": _AUTO_COUNT,
    "nccl.buffsize": KnobType(low=1024, auto=True, size=True),
    "nccl.nthreads": KnobType(choices=("auto", 64, 128, 256, 512)),
    "nccl.p2p_level": KnobType(choices=("auto", "LOC", "NVL", "PIX", "PXB", "PHB", "SYS")),
    "host.numa_bind": _FLAG,
    "cuda_graph.decode": _FLAG,
    "cuda_graph.draft": _FLAG,
    "cuda_graph.verify": _FLAG,
    "cuda_graph.extend": _FLAG,
}
assert set(KNOB_TYPES) == set(KNOB_FIELDS)

#: values of one knob that a space may list: each is tried with every other knob of its block
MAX_VALUES = 1024


def parse_dimension(knob: str, written: object) -> tuple[Scalar, ...]:
    """The distinct values that a study lists for ``knob``, in its order.

    Raises ``ValueError``: unknown knob (with the nearest name), wrong value, empty list or range.
    """
    kind = knob_type(knob)
    values = _spelled_out(written)
    if not values:
        raise ValueError("lists no value; give at least one or leave the knob out")
    parsed: list[Scalar] = []
    for value in values:
        item = _backend_value(value) if kind is None else kind.parse(value)
        if not any(type(item) is type(seen) and item == seen for seen in parsed):
            parsed.append(item)
    return tuple(parsed)


def knob_type(knob: str) -> KnobType | None:
    """Type of a knob; None for a knob of one backend. Raises ``ValueError`` if unknown."""
    if knob in KNOB_TYPES:
        return KNOB_TYPES[knob]
    prefix, dot, rest = knob.partition(".")
    if prefix in BACKEND_PREFIXES and dot and rest:
        return None
    raise ValueError(f"unknown knob{suggestion(knob, KNOB_TYPES)}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` or the list of what is known."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(names)}"


def _spelled_out(written: object) -> list[object]:
    """A scalar, list or ``{int: [low, high]}`` as a list of values."""
    if isinstance(written, Mapping):
        step = written.get("step", 1)
        bounds = written.get("int")
        if set(written) - {"int", "step"} or not _is_pair(bounds) or not _is_int(step) or step < 1:
            raise ValueError(f"{dict(written)!r} is no range; write {{int: [low, high]}}")
        low, high = cast(Sequence[int], bounds)
        if low > high:
            raise ValueError(f"range [{low}, {high}] is empty; write {{int: [low, high]}}")
        values = range(low, high + 1, step)
        if len(values) > MAX_VALUES:
            raise ValueError(
                f"range [{low}, {high}] has {len(values)} values, {MAX_VALUES} are the limit; "
                f"write a smaller one, or a step: {{int: [low, high], step: {step * 10}}}"
            )
        return list(values)
    if isinstance(written, list | tuple):
        return list(written)
    return [written]


def _is_int(value: object) -> bool:
    return type(value) is int


def _is_pair(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_int, value))


def _backend_value(value: object) -> Scalar:
    if isinstance(value, str | bool | int | float):
        return value
    raise ValueError(f"{value!r} is not allowed; allowed: text, a number, true or false")


def _shown(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
