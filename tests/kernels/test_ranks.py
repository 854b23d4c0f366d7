"""The best token over ranks equals the reference: ties, NaN and ended rows included."""

import pytest
import torch

from kernels.cycle import LEFT
from tests.kernels.helpers import REFERENCE, TRITON, assert_close, assert_same, randn


def _pairs(device: torch.device, ranks: int, rows: int) -> torch.Tensor:
    """Logits and ids of every rank; the first rows hold a tie, a NaN each way, and infinities."""
    value = torch.randn(ranks, rows)
    odd = [(2.0, 2.0), (9.0, float("nan")), (float("nan"), 9.0), (float("inf"), float("-inf"))]
    for row, (first, last) in enumerate(odd[: rows - 1]):
        value[0, row], value[-1, row] = first, last
    token = torch.arange(ranks)[:, None] * 100 + torch.randint(0, 100, (ranks, rows))
    return torch.stack((value, token.float()), dim=1).to(device)


def _assert_equal(wanted: torch.Tensor, got: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows", [1, 5, 130])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_best_of_ranks_equals_reference(device: torch.device, ranks: int, rows: int) -> None:
    pairs = _pairs(device, ranks, rows)
    for wanted, got in zip(
        REFERENCE.best_of_ranks(pairs), TRITON.best_of_ranks(pairs), strict=True
    ):
        _assert_equal(wanted, got)


@pytest.mark.parametrize(("rows", "start"), [(1, 0), (5, 75_968), (130, 2**24 - 100)])
def test_a_ranks_pairs_hold_ids_of_the_whole_vocabulary(
    device: torch.device, rows: int, start: int
) -> None:
    token = torch.randint(0, 99, (rows,), device=device)
    value = torch.randn(rows).to(device)
    assert_same("pair_best", token, value, start)
    assert TRITON.pair_best(token, value, start)[1].long().tolist() == (token + start).tolist()


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 17])
def test_finish_ranks_equals_reference(
    device: torch.device, dtype: torch.dtype, rows: int, ranks: int
) -> None:
    # the engine's whole matrix, of which a batch is the first columns; some have nothing left
    whole = torch.randint(1, 90, (4, 300))
    whole[LEFT] = torch.randint(-1, 5, (300,))
    pairs, embed = _pairs(device, ranks, rows), randn(device, dtype, 100 * ranks, 64)
    left = []
    for ops in (REFERENCE, TRITON):
        state = whole.to(device, copy=True)
        record = torch.full((rows, 1), 7, device=device)
        following = torch.empty(rows, 64, dtype=dtype, device=device)
        ops.finish_ranks(pairs, state[:, :rows], record, embed, following)
        left.append((state, record, following))
    for wanted, got in zip(*left, strict=True):
        assert_close(got, wanted)
