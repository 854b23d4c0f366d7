"""What differs between two runs, group by group; what one side does not tell is never equal."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.diff.run import GROUPS, Group, Run
from autotune.foreign.run import with_article
from model.spec import KNOB_FIELDS

#: a continuous state counts as different beyond this share of its value
_TOLERANCE: Mapping[str, float] = {
    "clock_mhz": 0.02,
    "temperature_c": 0.15,
    "power_w": 0.10,
    "load_average": 0.5,
}
_NUMBER = re.compile(r"^(-?[\d.]+)")
#: parts of a draft tree are one decision
TREE = ("speculation.method", "speculation.steps", "speculation.topk", "speculation.draft_tokens")
#: NCCL variable -> the knob that sets it
OWNED: Mapping[str, str] = {
    "NCCL_ALGO": "nccl.algo",
    "NCCL_PROTO": "nccl.proto",
    "NCCL_MIN_NCHANNELS": "nccl.min_channels",
    "NCCL_MAX_NCHANNELS": "nccl.max_channels",
    "NCCL_BUFFSIZE": "nccl.buffsize",
    "NCCL_NTHREADS": "nccl.nthreads",
    "NCCL_P2P_LEVEL": "nccl.p2p_level",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One fact that is known on both sides and differs."""

    group: Group
    key: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Something that one side (or both) does not tell."""

    group: Group
    #: "A", "B" or "A and B"
    side: str
    #: keys the other side tells; empty: the whole group
    keys: tuple[str, ...]
    why: str


def differences(a: Run, b: Run) -> tuple[Difference, ...]:
    """Facts known on both sides that differ, in the order of the groups."""
    found = []
    for group in GROUPS:
        left, right = dict(a.facts.get(group, {})), dict(b.facts.get(group, {}))
        if group == "environment":
            _fill_unset(a, b, left, right)
        for key in _keys(left, right):
            if not _alike(key, left[key], right[key]):
                found.append(Difference(group=group, key=key, a=left[key], b=right[key]))
    return tuple(d for d in found if not _set_by_knob(d, found))


def gaps(a: Run, b: Run) -> tuple[Gap, ...]:
    """What cannot be compared, collapsed by group."""
    found = []
    for group in GROUPS:
        left, right = a.facts.get(group, {}), b.facts.get(group, {})
        if not left and not right:
            why = _why(a, group)
            found.append(Gap(group=group, side="A and B", keys=(), why=why))
            continue
        for side, run, other, mine in (("A", a, right, left), ("B", b, left, right)):
            if group == "environment" and mine and group not in run.unknown:
                # the whole environment was read: a variable that is not there is unset
                continue
            missing = tuple(key for key in other if key not in mine)
            if not mine:
                found.append(Gap(group=group, side=side, keys=(), why=_why(run, group)))
            elif missing:
                found.append(Gap(group=group, side=side, keys=missing, why=_why(run, group)))
    return tuple(found)


def _why(run: Run, group: Group) -> str:
    if group in run.unknown:
        return run.unknown[group]
    reasons = [text for key, text in run.unknown.items() if key.startswith(f"{group}.")]
    return "; ".join(dict.fromkeys(reasons)) or f"{with_article(run.kind)} does not tell"


def _fill_unset(a: Run, b: Run, left: dict[str, str], right: dict[str, str]) -> None:
    """Where a side's whole environment is known, what it lacks is unset."""
    for run, mine, other in ((a, left, right), (b, right, left)):
        if mine and "environment" not in run.unknown:
            for key in other:
                if not key.startswith("NCCL chose"):
                    mine.setdefault(key, "unset")


def _keys(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    shared = [key for key in left if key in right]
    order = list(KNOB_FIELDS)
    return sorted(shared, key=lambda key: (order.index(key) if key in order else len(order), key))


def _alike(key: str, left: str, right: str) -> bool:
    if left == right:
        return True
    tolerance = _TOLERANCE.get(key)
    numbers = [_NUMBER.match(text) for text in (left, right)]
    if tolerance is None or not all(numbers):
        return False
    first, second = (float(match[1]) for match in numbers if match is not None)
    scale = max(abs(first), abs(second), 1.0 if key == "load_average" else 1e-9)
    return abs(first - second) <= tolerance * scale


def _set_by_knob(difference: Difference, found: list[Difference]) -> bool:
    """A variable that a knob sets, where that knob differs as well: one difference, not two."""
    knob = OWNED.get(difference.key)
    return difference.group == "environment" and any(other.key == knob for other in found)
