"""The bounds check of the interpreter's tests finds what it is there for."""

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.bounds import extent


@triton.jit
def _copy_kernel(x, y, first, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + first + i, mask=i < count), mask=i < count)


@pytest.mark.parametrize(("first", "count"), [(0, 5), (1, 4), (-1, 4), (9000, 1)], ids=str)
def test_a_stray_address_fails_the_test(first: int, count: int) -> None:
    whole = torch.arange(100.0)
    x, y = whole[10:14], torch.zeros(8)
    with pytest.raises(Exception, match="outside every argument"):
        _copy_kernel[(1,)](x, y, first, count, BLOCK=8)


def test_addresses_within_a_view_pass() -> None:
    x, y = torch.arange(100.0)[10:14], torch.zeros(8)
    _copy_kernel[(1,)](x, y, 0, 4, BLOCK=8)
    assert y.tolist() == [10, 11, 12, 13, 0, 0, 0, 0]


def test_a_strided_view_ends_with_its_last_element() -> None:
    x = torch.zeros(6, 4)[1:3, :2]
    low, high = extent(x)
    assert (high - low) // 4 == 4 + 2
    assert low == x.data_ptr()
