"""The search space: every distinct, possible knobs of a study, without building them all.

A space is a product of independent blocks (speculation, collectives, and one block for each other
knob). Each block is enumerated in canonical form and filtered, so impossible and equivalent
choices never multiply; the product itself stays lazy, and 10^8 knobs cost nothing.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autotune.errors import UserError
from model.spec import KNOB_FIELDS, Inert, Knobs, Scalar

Value = Scalar | None
Params = Mapping[str, Value]

_SPECULATION = (
    "speculation.method",
    "speculation.steps",
    "speculation.topk",
    "speculation.draft_tokens",
    "cuda_graph.draft",
    "cuda_graph.verify",
    "cuda_graph.extend",
)
_METHOD = _SPECULATION[0]
_COLLECTIVES = ("collectives.backend", *(name for name in KNOB_FIELDS if name.startswith("nccl.")))
#: all-reduce implementations that need GPUs
_GPU_COLLECTIVES = ("nccl", "one_shot", "two_shot", "symmetric")


class Host(Protocol):
    """What the space must know of a machine; ``num_gpus`` 0 means CPU ranks."""

    @property
    def num_gpus(self) -> int: ...


@dataclass(frozen=True)
class Block:
    """Knobs that restrict one another, and their possible canonical values."""

    names: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]

    def nearest(self, params: Params) -> int:
        """Row with the fewest and smallest differences to ``params``; missing names match all."""

        def distance(row: tuple[Value, ...]) -> float:
            return sum(
                _distance(value, params[name])
                for name, value in zip(self.names, row, strict=True)
                if name in params
            )

        return min(range(len(self.rows)), key=lambda index: distance(self.rows[index]))


@dataclass(frozen=True)
class Space:
    """All possible knobs of a study, numbered 0 .. size-1."""

    blocks: tuple[Block, ...]
    #: knobs that the study lists but that cannot matter on this machine
    inert: tuple[Inert, ...]
    #: reason -> number of raw combinations dropped for it
    dropped: Mapping[str, int]
    #: knob -> listed values that no possible knobs have
    unused: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of distinct possible knobs."""
        return math.prod(len(block.rows) for block in self.blocks)

    def at(self, index: int) -> Knobs:
        """The knobs numbered ``index``."""
        values: dict[str, Value] = {}
        for block in self.blocks:
            index, row = divmod(index, len(block.rows))
            values.update(zip(block.names, block.rows[row], strict=True))
        return Knobs.of(values)

    def index_of(self, knobs: Knobs) -> int | None:
        """Number of ``knobs``; None when the space does not hold them."""
        values, index, radix = knobs.values(), 0, 1
        for block in self.blocks:
            row = tuple(values.get(name) for name in block.names)
            try:
                index += radix * block.rows.index(row)
            except ValueError:
                return None
            radix *= len(block.rows)
        return index if self.at(index) == knobs else None

    def __contains__(self, knobs: Knobs) -> bool:
        return self.index_of(knobs) is not None

    def sample(self, limit: int, seed: int) -> list[Knobs]:
        """All knobs when there are at most ``limit``, else ``limit`` distinct ones at random."""
        if self.size <= limit:
            return [self.at(index) for index in range(self.size)]
        rng = random.Random(seed)
        return [self.at(index) for index in sorted(rng.sample(range(self.size), limit))]

    def nearest(self, params: Params) -> Knobs:
        """The possible knobs most like ``params`` (values by dotted name)."""
        values: dict[str, Value] = {}
        for block in self.blocks:
            values.update(zip(block.names, block.rows[block.nearest(params)], strict=True))
        return Knobs.of(values)

    def neighbours(self, knobs: Knobs) -> Iterator[Knobs]:
        """Knobs that differ from ``knobs`` in one block only."""
        for index in range(len(self.blocks)):
            yield from (other for other in self.line(knobs, index) if other != knobs)

    def line(self, knobs: Knobs, block: int) -> list[Knobs]:
        """``knobs`` with every possible choice of one block (its number), their own included."""
        base, chosen = knobs.values(), self.blocks[block]
        return [Knobs.of({**base, **_named(chosen, row)}) for row in chosen.rows]

    def choices(self) -> dict[str, tuple[Value, ...]]:
        """Every knob with the values that it takes in some possible knobs, sorted."""
        found: dict[str, tuple[Value, ...]] = {}
        for block in self.blocks:
            for column, name in enumerate(block.names):
                found[name] = tuple(sorted({row[column] for row in block.rows}, key=_sort_key))
        return found


def build_space(
    listed: Mapping[str, tuple[Scalar, ...]],
    host: Host | None,
    tp_problem: Callable[[int], str | None] = lambda tp: None,
) -> Space:
    """Build the space a study lists for ``host`` (None: nothing is known of the machine).

    ``tp_problem`` says why a tensor-parallel size does not suit the model. Raises ``UserError``
    with the reason when no combination is possible.
    """
    inert: list[Inert] = []
    dropped: Counter[str] = Counter()
    complete = _completed(listed)
    _refuse_contradictions(complete)
    effective = _on_host(complete, host, inert, dropped)
    blocks = []
    for names in _block_names(effective):
        rows = _rows(names, effective, tp_problem, dropped)
        blocks.append(Block(names=names, rows=rows))
    space = Space(blocks=tuple(blocks), inert=tuple(inert), dropped=dict(dropped))
    idle = {item.knob for item in inert}
    return replace(
        space, unused={n: v for n, v in _unused(space, complete).items() if n not in idle}
    )


def _unused(
    space: Space, listed: Mapping[str, tuple[Scalar, ...]]
) -> dict[str, tuple[Scalar, ...]]:
    """Listed values that no possible knobs have: out of range, or decided by other knobs."""
    found = {}
    for name, possible in space.choices().items():
        values = [value for value in listed.get(name, ()) if value not in ("auto", "off")]
        kept = [value for value in values if value in possible]
        # a knob that is never as it was written is spelt in another way, not left out
        if kept and len(kept) < len(values):
            found[name] = tuple(value for value in values if value not in kept)
    return found


def baseline_knobs(space: Space, listed: Mapping[str, tuple[Scalar, ...]]) -> Knobs:
    """Plain decoding with every other setting left to itself.

    A setting is "auto" where the study lists that, else its first listed value that is possible.
    """
    wanted: dict[str, Value] = {"speculation.method": "off"}
    for name, values in listed.items():
        if not name.startswith("speculation."):
            wanted[name] = "auto" if "auto" in values else values[0]
    rest = {
        name: (None if value == "auto" and None in space.choices().get(name, ()) else value)
        for name, value in wanted.items()
    }
    resolved = space.nearest(rest).values()
    return Knobs.of({**resolved, "speculation.method": "off"})


def _completed(listed: Mapping[str, tuple[Scalar, ...]]) -> dict[str, tuple[Scalar, ...]]:
    """Add what the listed knobs imply; refuse a speculation that is not described enough."""
    complete = dict(listed)
    if "speculation.method" not in complete:
        speculates = any(name.startswith("speculation.") for name in complete)
        complete["speculation.method"] = ("eagle3",) if speculates else ("off",)
    if "eagle3" in complete["speculation.method"]:
        if "speculation.steps" not in complete:
            raise UserError(
                "space.speculation.steps is missing; eagle3 needs it, such as {int: [1, 4]}"
            )
        complete.setdefault("speculation.topk", (1,))
        topk = complete["speculation.topk"]
        if "speculation.draft_tokens" not in complete and any(int(k) > 1 for k in topk):
            raise UserError(
                "space.speculation.draft_tokens is missing; a tree (topk above 1) needs it, "
                "such as {int: [2, 16]}"
            )
    return complete


def _refuse_contradictions(listed: Mapping[str, tuple[Scalar, ...]]) -> None:
    """Refuse lists that contradict one another on any machine, even where they are inert here.

    A study file is often written on one host for another: NCCL settings that no NCCL can take, or
    a chain's length that no listed number of steps has, are mistakes wherever they stand.
    """
    nccl = {name: values for name, values in listed.items() if name.startswith("nccl.")}
    if nccl:
        carried = {"collectives.backend": ("nccl",), **nccl}
        _rows(tuple(carried), carried, lambda tp: None, Counter())
    steps = listed.get("speculation.steps", ())
    tokens = listed.get("speculation.draft_tokens")
    only_chains = set(listed.get("speculation.topk", ())) == {1}
    speculates = "eagle3" in listed["speculation.method"]
    if speculates and only_chains and tokens is not None:
        lengths = sorted({int(count) + 1 for count in steps})
        if not set(lengths) & set(tokens):
            raise UserError(
                f"space.speculation.draft_tokens: {_listing(tokens)} is impossible: with topk 1 a "
                f"chain has steps + 1 = {', '.join(map(str, lengths))} tokens (root included); "
                f"list these, or leave draft_tokens out"
            )


def _on_host(
    listed: Mapping[str, tuple[Scalar, ...]],
    host: Host | None,
    inert: list[Inert],
    dropped: Counter[str],
) -> dict[str, tuple[Scalar, ...]]:
    """Drop what the machine cannot do, and reduce to one value what cannot matter there."""
    effective = dict(listed)
    if host is None:
        return effective
    if host.num_gpus == 0:
        for name, values in listed.items():
            if name.startswith("cuda_graph."):
                effective[name] = (False,)
                if True in values:
                    inert.append(Inert(name, "this machine has no GPU, so no CUDA graphs"))
            elif name.startswith("nccl."):
                effective[name] = ("auto",)
                if values != ("auto",):
                    inert.append(Inert(name, "this machine has no GPU, so NCCL carries nothing"))
        backends = listed.get("collectives.backend", ("gloo",))
        kept = tuple(name for name in backends if name not in _GPU_COLLECTIVES)
        for refused in (name for name in backends if name not in kept):
            dropped[f"collectives.backend {refused} needs GPUs and this machine has none"] += 1
        if not kept:
            raise UserError(
                f"space.collectives.backend: {', '.join(map(str, backends))} needs GPUs and this "
                f"machine has none; list gloo"
            )
        effective["collectives.backend"] = kept
    return effective


def _block_names(listed: Mapping[str, tuple[Scalar, ...]]) -> list[tuple[str, ...]]:
    """Which knobs are enumerated together; every listed knob is in exactly one block."""
    joint = [
        tuple(name for name in group if name in listed) for group in (_SPECULATION, _COLLECTIVES)
    ]
    rest = [(name,) for name in listed if not any(name in group for group in joint)]
    blocks = [*(group for group in joint if group), *rest]
    # with speculation the tree's size is always part of the knobs, listed or not
    full = _SPECULATION[:4]
    return [
        (*full, *(n for n in group if n not in full)) if group and group[0] == full[0] else group
        for group in blocks
    ]


def _rows(
    names: tuple[str, ...],
    listed: Mapping[str, tuple[Scalar, ...]],
    tp_problem: Callable[[int], str | None],
    dropped: Counter[str],
) -> tuple[tuple[Value, ...], ...]:
    """Distinct canonical rows of a block, in the order of the study; refuses an empty block."""
    own = [name for name in names if name in listed]
    rows: dict[tuple[Value, ...], None] = {}
    reasons: Counter[str] = Counter()
    for chosen in itertools.product(*(listed[name] for name in own)):
        values = dict(zip(own, chosen, strict=True))
        try:
            knobs = Knobs.of(values)
        except ValueError as error:
            reasons[str(error)] += 1
            continue
        tp = values.get("parallel.tp")
        problem = tp_problem(int(tp)) if tp is not None else None
        if problem is not None:
            reasons[problem] += 1
            continue
        resolved = knobs.values()
        rows[tuple(resolved[name] for name in names)] = None
    # a study that lists speculation must not end as plain decoding alone without a word
    kept = {row[names.index(_METHOD)] for row in rows} if _METHOD in own else set()
    missing = [method for method in listed.get(_METHOD, ()) if kept and method not in kept]
    if not rows or missing:
        reason, _ = reasons.most_common(1)[0]
        listing = "; ".join(f"{name}: {_listing(listed[name])}" for name in own)
        which = f" with {_METHOD} {missing[0]}" if missing else ""
        raise UserError(
            f"space: no combination{which} is possible: {reason} ({listing}); widen a list"
        )
    dropped.update(reasons)
    return tuple(rows)


def _named(block: Block, row: tuple[Value, ...]) -> dict[str, Value]:
    return dict(zip(block.names, row, strict=True))


def _listing(values: Sequence[Scalar]) -> str:
    shown = ", ".join(map(str, values[:6]))
    return f"[{shown}{', ...' if len(values) > 6 else ''}]"


def _distance(left: Value, right: Value) -> float:
    if type(left) is type(right) and left == right:
        return 0.0
    numeric = (int, float)
    both = isinstance(left, numeric) and isinstance(right, numeric)
    if both and not isinstance(left, bool) and not isinstance(right, bool):
        assert isinstance(left, numeric)
        assert isinstance(right, numeric)
        return min(1.0, abs(left - right) / (1.0 + max(abs(left), abs(right))))
    return 1.0


def _sort_key(value: Value) -> tuple[bool, str, float, str]:
    """None first, then by type, numbers by size."""
    number = float(value) if isinstance(value, int | float) else 0.0
    return (value is not None, type(value).__name__, number, str(value))
