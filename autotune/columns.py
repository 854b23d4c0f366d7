"""The values of many knobs by column, so that questions about all of them are array operations."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from model.spec import Knobs, Scalar

Mask = NDArray[np.bool_]


class Columns:
    """Codes of every value of N knobs; a knob that some do not have is None there."""

    def __init__(self, knobs: Sequence[Knobs]) -> None:
        rows = [each.values() for each in knobs]
        self._num = len(rows)
        self._codes: dict[str, NDArray[np.int32]] = {}
        self._code_of: dict[str, dict[Scalar | None, int]] = {}
        for name in dict.fromkeys(name for row in rows for name in row):
            code_of: dict[Scalar | None, int] = {}
            codes = (code_of.setdefault(row.get(name), len(code_of)) for row in rows)
            self._codes[name] = np.fromiter(codes, dtype=np.int32, count=self._num)
            self._code_of[name] = code_of

    def equal(self, name: str, value: Scalar | None) -> Mask:
        """Which knobs have this value, [N]."""
        if name not in self._codes:
            return np.full(self._num, value is None)
        mask: Mask = self._codes[name] == self._code_of[name].get(value, -1)
        return mask

    def equal_any(self, name: str, values: Sequence[Scalar | None]) -> Mask:
        """Which knobs have one of these values, [N]."""
        mask = np.zeros(self._num, dtype=bool)
        for value in values:
            mask |= self.equal(name, value)
        return mask

    def num_differing(self, values: Mapping[str, Scalar | None]) -> NDArray[np.int32]:
        """In how many values each of the knobs differs from ``values``, [N]."""
        total = np.zeros(self._num, dtype=np.int32)
        for name in self._codes:
            total += ~self.equal(name, values.get(name))
        return total

    @property
    def names(self) -> tuple[str, ...]:
        """Every knob that some of them have."""
        return tuple(self._codes)
