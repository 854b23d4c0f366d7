"""Linear layers with the norm in front or the addition behind, and the head's argmax."""

import pytest
import torch

from kernels import linear, tuning
from kernels.opset import opset
from tests.kernels.helpers import TRITON, assert_same, randn

EPS = 1e-6
SHAPES = [(1, 50, 200), (3, 50, 200), (17, 33, 96), (1, 7, 4100)]


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_norm_linear_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, outputs: int, inputs: int
) -> None:
    x, norm = randn(device, dtype, tokens, inputs), randn(device, dtype, inputs)
    weight = randn(device, dtype, outputs, inputs, scale=inputs**-0.5)
    assert_same("norm_linear", x, norm, EPS, weight)


@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES[:2])
def test_add_norm_linear_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, outputs: int, inputs: int
) -> None:
    x = (torch.randint(-32, 32, (tokens, inputs)) / 16).to(device, dtype)
    weight = randn(device, dtype, outputs, inputs, scale=inputs**-0.5)
    norm = randn(device, dtype, inputs)
    assert_same("add_norm_linear", x, x.flip(0).contiguous(), norm, EPS, weight)


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "none"])
@pytest.mark.parametrize(("tokens", "outputs", "inputs"), SHAPES)
def test_linear_add_equals_reference(
    device: torch.device,
    dtype: torch.dtype,
    with_residual: bool,
    tokens: int,
    outputs: int,
    inputs: int,
) -> None:
    x = randn(device, dtype, tokens, inputs)
    weight = randn(device, dtype, outputs, inputs, scale=inputs**-0.5)
    residual = randn(device, dtype, tokens, outputs) if with_residual else None
    assert_same("linear_add", x, weight, residual)


@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 5])
def test_every_split_over_the_inputs_gives_the_same(
    device: torch.device, split: int, tokens: int
) -> None:
    config = {
        "vector": 0, "block_t": 16, "block_o": 16, "block_k": 32, "split_k": split, "stages": 2,
        "num_warps": 2,
    }  # fmt: skip
    x, norm = randn(device, torch.float32, tokens, 200), randn(device, torch.float32, 200)
    weight = randn(device, torch.float32, 40, 200, scale=0.1)
    with tuning.forced("norm_linear", config):
        assert_same("norm_linear", x, norm, EPS, weight)
        # again: the counters of the first call must be back at zero
        assert_same("add_norm_linear", x, x.clone(), norm, EPS, weight)


@pytest.mark.parametrize("op", ["norm_linear", "add_norm_linear", "linear_add"])
@pytest.mark.parametrize(
    ("tokens", "config"),
    [
        pytest.param(t, c, id=f"{name}-{t}")
        for name, c, sizes in (
            ("rows-in-registers", {"vector": 1, "block_o": 4, "block_k": 64, "ahead": 1,
                                   "num_warps": 2}, (1, 2, 7, 8)),
            ("two-tiles-ahead", {"vector": 1, "block_o": 8, "block_k": 32, "ahead": 2,
                                 "num_warps": 1}, (3,)),
            ("whole-rows-ahead", {"vector": 1, "block_o": 2, "block_k": 256, "ahead": 3,
                                  "num_warps": 1}, (1, 4)),
            ("eight-rows", {"vector": 0, "block_t": 8, "block_o": 16, "block_k": 32, "split_k": 4,
                            "stages": 3, "swap": 1, "num_warps": 1}, (4, 8, 9)),
            ("side-by-side", {"vector": 0, "block_t": 8, "block_o": 16, "block_k": 16, "ways": 4,
                              "split_k": 1, "stages": 2, "num_warps": 4}, (1, 4, 9)),
            ("side-by-side-split", {"vector": 0, "block_t": 16, "block_o": 16, "block_k": 32,
                                    "ways": 2, "split_k": 2, "stages": 3, "num_warps": 2}, (3, 17)),
            ("more-ways-than-inputs", {"vector": 0, "block_t": 8, "block_o": 16, "block_k": 64,
                                       "ways": 8, "split_k": 1, "stages": 2, "num_warps": 8}, (5,)),
            ("swapped", {"vector": 0, "block_t": 16, "block_o": 64, "block_k": 32, "split_k": 1,
                         "stages": 2, "swap": 1, "norm_first": 1, "num_warps": 4}, (2, 19)),
            ("swapped-split", {"vector": 0, "block_t": 16, "block_o": 16, "block_k": 64,
                               "split_k": 2, "stages": 3, "swap": 1, "num_warps": 1}, (5,)),
            ("norm-first", {"vector": 0, "block_t": 16, "block_o": 32, "block_k": 64, "split_k": 1,
                            "stages": 3, "norm_first": 1, "num_warps": 2}, (1, 6)),
        )
        for t in sizes
    ],
)  # fmt: skip
def test_every_kind_of_configuration_equals_the_reference(
    device: torch.device, op: str, tokens: int, config: dict[str, int]
) -> None:
    x, norm = randn(device, torch.float32, tokens, 200), randn(device, torch.float32, 200)
    weight = randn(device, torch.float32, 50, 200, scale=0.1)
    with tuning.forced(op.removeprefix("add_"), config):
        if op == "norm_linear":
            assert_same(op, x, norm, EPS, weight)
        elif op == "add_norm_linear":
            assert_same(op, x, x.flip(0).contiguous() * 0.5, norm, EPS, weight)
        else:
            assert_same(op, x, weight, randn(device, torch.float32, tokens, 50))


@pytest.mark.parametrize("shape", [(3, 200, 50), (2, 66, 9), (4, 33, 17)], ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "odd-offset"])
def test_bf16_pairs_and_single_elements_give_the_same(
    device: torch.device, shape: tuple[int, int, int], shift: int
) -> None:
    """Rows are read as words of two where they begin at even elements; elsewhere one by one."""
    tokens, inputs, outputs = shape
    x = randn(device, torch.bfloat16, tokens, inputs)
    room = randn(device, torch.bfloat16, outputs * inputs + shift, scale=inputs**-0.5)
    weight = room[shift:].view(outputs, inputs)
    config = {"vector": 1, "block_o": 4, "block_k": 64, "ahead": 1, "num_warps": 1}
    assert linear.in_pairs(x, weight) == (shift == 0 and inputs % 2 == 0)
    with tuning.forced("norm_linear", config), tuning.forced("linear_add", config):
        assert_same("norm_linear", x, randn(device, torch.bfloat16, inputs), EPS, weight)
        assert_same("linear_add", x, weight, None)


def test_weights_in_registers_refuse_more_tokens_than_they_hold() -> None:
    config = {"vector": 1, "block_o": 4, "block_k": 256, "num_warps": 2}
    with (
        tuning.forced("linear_add", config),
        pytest.raises(ValueError, match="take 8 tokens at most, got 9"),
    ):
        TRITON.linear_add(torch.zeros(9, 200), torch.zeros(50, 200), None)


def test_a_block_of_fewer_rows_than_a_tensor_core_takes_is_refused() -> None:
    config = {"vector": 0, "block_t": 8, "block_o": 32, "block_k": 32, "split_k": 1, "stages": 2,
              "swap": 0, "num_warps": 4}  # fmt: skip
    with (
        tuning.forced("linear_add", config),
        pytest.raises(ValueError, match="a product of 8 rows"),
    ):
        TRITON.linear_add(torch.zeros(4, 64), torch.zeros(48, 64), None)


def test_linear_add_may_write_over_its_residual(device: torch.device) -> None:
    x, weight = randn(device, torch.float32, 3, 64), randn(device, torch.float32, 48, 64)
    stream = randn(device, torch.float32, 3, 48)
    wanted = opset("reference").linear_add(x, weight, stream)
    got = TRITON.linear_add(x, weight, stream, stream)
    assert got.data_ptr() == stream.data_ptr()
    torch.testing.assert_close(stream, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 4])
def test_argmax_of_the_head_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int
) -> None:
    x, norm = randn(device, dtype, tokens, 64), randn(device, dtype, 64)
    weight = randn(device, dtype, 333, 64, scale=0.1)
    # far-apart winners: near-ties are not what this is about
    for t in range(tokens):
        weight[100 * t + 7] = 3 * (x[t].float() * norm.float()).to(dtype) / x[t].float().norm()
    token, logit = TRITON.norm_linear_argmax(x, norm, EPS, weight)
    wanted_token, wanted_logit = opset("reference").norm_linear_argmax(x, norm, EPS, weight)
    assert torch.equal(token, wanted_token)
    torch.testing.assert_close(logit, wanted_logit, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3])
def test_the_first_of_equal_logits_wins(device: torch.device, tokens: int) -> None:
    x, norm = torch.ones(tokens, 32, device=device), torch.ones(32, device=device)
    weight = torch.zeros(100, 32, device=device)
    weight[[41, 42, 97]] = 1.0
    token, _ = TRITON.norm_linear_argmax(x, norm, EPS, weight)
    assert token.tolist() == [41] * tokens


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        pytest.param(torch.zeros(1, 8), torch.zeros(4, 9), "9 columns, x has 8", id="columns"),
        pytest.param(
            torch.zeros(1, 8),
            torch.zeros(4, 8, dtype=torch.bfloat16),
            "must be the same",
            id="type",
        ),
        pytest.param(torch.zeros(8, 2).T, torch.zeros(4, 8), "contiguous", id="strides"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    x: torch.Tensor, weight: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TRITON.linear_add(x, weight, None)
