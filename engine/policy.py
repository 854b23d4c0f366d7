"""How the kernels of a forward are launched, by its number of rows.

Measured on an H200 (``bench/kernel_variants.py``, whole forward of 8 layers of Qwen3-30B-A3B, in
microseconds): for one row the output projection and the router apart, with the small kernels and
the experts' launched early, take 502 (without the experts' 507, none early 516); for 4 rows joined
with the experts' early 946 (without 952, apart 956); for 16 rows joined 1963 (early 1977, apart
2043); for 64 rows nothing gains.
``AUTOTUNE_ROUTER`` (auto, joined, split) and ``AUTOTUNE_PDL`` (see ``kernels.launch``)
decide otherwise.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kernels.launch import programmatic_launch

ROUTER_VARIABLE, EARLY_VARIABLE = "AUTOTUNE_ROUTER", "AUTOTUNE_PDL"
ROUTER_CHOICES = ("auto", "joined", "split")
#: rows that the joined kernel can serve
JOINED_ROWS = range(1, 17)


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice."""

    joins_router: bool
    #: ops whose kernels may start before their predecessor has ended
    early: frozenset[str]


_EXPERTS = frozenset({"moe_gate_up", "moe_down"})
_APART = Policy(False, _EXPERTS | {"linear_add", "norm_route", "other"})
_JOINED_EARLY = Policy(True, _EXPERTS)
_JOINED = Policy(True, frozenset())
_PLAIN = Policy(False, frozenset())
#: rows up to which a policy holds
_BY_ROWS = ((1, _APART), (4, _JOINED_EARLY), (16, _JOINED))


def choice(variable: str, choices: tuple[str, ...]) -> str:
    """An environment variable's value, the first choice when unset; ``ValueError`` for another."""
    value = os.environ.get(variable, choices[0])
    if value not in choices:
        raise ValueError(f"{variable}={value!r}: must be one of {', '.join(choices)}")
    return value


class Policies:
    """The policy of each number of rows; ``alone``: no sum over ranks comes between the kernels."""

    def __init__(self, *, alone: bool) -> None:
        self.alone = alone
        self.router = choice(ROUTER_VARIABLE, ROUTER_CHOICES)
        self._early_by_variable = EARLY_VARIABLE in os.environ

    def joins_router(self, num_rows: int) -> bool:
        """Whether the output projection and the router are one kernel."""
        if not self.alone or num_rows not in JOINED_ROWS:
            return False
        if self.router == "auto":
            return _of(num_rows).joins_router
        return self.router == "joined"

    @contextmanager
    def launching(self, num_rows: int) -> Iterator[None]:
        """Launch as measured best within this block; no rows: nothing early."""
        if self._early_by_variable:
            yield
            return
        early = _of(num_rows).early if self.alone else frozenset[str]()
        with programmatic_launch(early):
            yield


def _of(num_rows: int) -> Policy:
    if num_rows == 0:
        return _PLAIN
    return next((policy for limit, policy in _BY_ROWS if num_rows <= limit), _PLAIN)
