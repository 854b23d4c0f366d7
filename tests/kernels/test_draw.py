"""Drawing by noise of seed, position and token: right shares, kernel equal to reference."""

import pytest
import torch

from kernels.draw import draw_ref, gumbel_ref
from tests.kernels.helpers import REFERENCE, TRITON, randn


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 333), (5, 4096), (3, 9001)])
@pytest.mark.parametrize("start", [0, 75_968])
def test_draw_equals_reference(
    device: torch.device, dtype: torch.dtype, rows: int, vocabulary: int, start: int
) -> None:
    logits = randn(device, dtype, rows, vocabulary, scale=3.0)
    heat = torch.tensor([0.7, 0.0, 1.3, 1.0, 0.2], device=device)[:rows].contiguous()
    seed = torch.tensor([0, 5, 2**40 + 3, 2**63 - 1, 9], device=device)[:rows].contiguous()
    position = torch.tensor([0, 7, 100_000, 3, 4], device=device)[:rows].contiguous()
    args = (logits, heat, seed, position, start)
    wanted, got = REFERENCE.draw(*args), TRITON.draw(*args)
    assert got[0].tolist() == wanted[0].tolist()
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-4, atol=1e-4)
    if rows > 1:
        assert int(got[0][1]) == int(logits[1].float().argmax())


def test_a_logit_that_is_no_number_shows_in_the_value(device: torch.device) -> None:
    logits = torch.zeros(3, 5000, device=device)
    logits[0, 4500] = float("nan")
    logits[1, 4500] = float("inf")
    heat = torch.tensor([0.0, 1.0, 1.0], device=device)
    some = torch.arange(3, device=device)
    for ops in (REFERENCE, TRITON):
        _, value = ops.draw(logits, heat, some, some, 0)
        assert value.isfinite().tolist() == [False, False, True]


def test_draws_follow_the_softmax() -> None:
    torch.manual_seed(1)
    logits, count = torch.randn(1, 12) * 2, 40_000
    heat = 0.8
    token, _ = draw_ref(
        logits.expand(count, -1),
        torch.full((count,), heat),
        torch.full((count,), 77),
        torch.arange(count),
        0,
    )
    share = torch.bincount(token, minlength=12) / count
    wanted = (logits[0] / heat).softmax(-1)
    deviation = (share - wanted).abs() / (wanted * (1 - wanted) / count).sqrt()
    assert float(deviation.max()) < 4.5


def test_noise_of_seeds_positions_and_tokens_has_nothing_in_common() -> None:
    seed = torch.tensor([1, 2, 1, 2**33 + 1])
    position = torch.tensor([10, 10, 11, 10])
    noise = gumbel_ref(seed, position, 0, 20_000)
    assert float(torch.corrcoef(noise).fill_diagonal_(0).abs().max()) < 0.03
    # mean and spread of the Gumbel distribution
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.std()) == pytest.approx(1.2825, abs=0.02)
    shifted = gumbel_ref(seed[:1], position[:1], 5, 100)
    assert torch.equal(shifted, noise[:1, 5:105])
