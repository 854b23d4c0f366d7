"""Numbers for people: digits kept, no powers of ten."""

import re
from pathlib import Path

import pytest

from autotune.digits import extent, significant, size_text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (32246.6, 4, "32247"),
        (1023.4, 3, "1023"),
        (9.996, 3, "10"),
        (99.96, 3, "100"),
        (0.0999, 2, "0.1"),
        (12.34, 3, "12.3"),
        (28.0, 3, "28"),
        (0.000163, 3, "0.000163"),
        (1.5e-7, 2, "0.00000015"),
        (0.0, 3, "0"),
        (-1234.5, 3, "-1234"),
        (float("inf"), 3, "inf"),
        (float("nan"), 3, "nan"),
    ],
)
def test_digits_are_kept_without_a_power_of_ten(value: float, digits: int, text: str) -> None:
    assert significant(value, digits) == text


def test_a_change_shows_its_sign() -> None:
    assert [significant(v, sign=True) for v in (2345.6, -0.5, 0.0)] == ["+2346", "-0.5", "+0"]
    assert extent(0.81234, 12345.6) == "0.812–12346"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (512, "512 B"),
        (14336, "14 KiB"),
        (1040000, "1016 KiB"),
        (1835008, "1.75 MiB"),
        (1535 * 2**20, "1535 MiB"),
    ],
)
def test_sizes_have_the_unit_that_keeps_them_short(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_nothing_else_rounds_to_digits_that_may_become_a_power_of_ten() -> None:
    # a file for programs, and a rounded tick that is no text
    exempt = {"model_validation/nvidia.py", "reporting/charts.py"}
    package = Path(__file__).parents[2] / "autotune"
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if re.search(r":[+-]?\.\d+g\b", path.read_text(encoding="utf-8"))
    }
    assert found == exempt
