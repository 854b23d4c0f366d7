"""RMSNorm, rotation and routing against their references and against other people's code."""

import pytest
import torch

from kernels import tuning
from kernels.launch import waiting_programs
from kernels.opset import opset
from kernels.router import route_ref
from tests.kernels.helpers import REFERENCE, assert_same, randn

EPS = 1e-6


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (3, 200), (5, 1), (2, 257)])
def test_rms_norm_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, hidden: int
) -> None:
    x, weight = randn(device, dtype, tokens, hidden), randn(device, dtype, hidden)
    assert_same("rms_norm", x, weight, EPS)


def test_rms_norm_takes_rows_of_a_wider_tensor(device: torch.device) -> None:
    wide = randn(device, torch.float32, 4, 300)
    assert_same("rms_norm", wide[:, :200], randn(device, torch.float32, 200), EPS)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (3, 200)])
def test_add_rms_norm_equals_reference(
    device: torch.device, dtype: torch.dtype, tokens: int, hidden: int
) -> None:
    # multiples of 1/16 below 4: their sum is exact in bf16, also where the interpreter truncates
    x = (torch.randint(-32, 32, (tokens, hidden)) / 16).to(device, dtype)
    assert_same("add_rms_norm", x, x.flip(0).contiguous(), randn(device, dtype, hidden), EPS)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(6, 2, 24), (1, 1, 64), (3, 3, 2)])
def test_qk_norm_rope_equals_reference(
    device: torch.device, dtype: torch.dtype, norm: bool, heads: int, kv_heads: int, head_size: int
) -> None:
    angle = torch.randn(11, head_size // 2, device=device).repeat(1, 2)
    weight = randn(device, dtype, 2, head_size) if norm else (None, None)
    # q and k as the views into one projection that they are
    qkv = randn(device, dtype, 5, heads + 2 * kv_heads, head_size)
    assert_same(
        "qk_norm_rope", qkv[:, :heads], qkv[:, heads : heads + kv_heads], weight[0], weight[1],
        EPS, torch.tensor([0, 10, 3, 3, 7], device=device), angle.cos(), angle.sin(),
    )  # fmt: skip


def test_rotation_reference_is_a_rotation_by_the_position() -> None:
    """Pair (i, i + D/2) turns by angle[position, i]: written out for one pair."""
    angle = torch.tensor([[0.3], [1.1]]).repeat(1, 2)
    q = torch.tensor([[[2.0, 5.0]]])
    turned, _ = REFERENCE.qk_norm_rope(
        q, q, None, None, EPS, torch.tensor([1]), angle.cos(), angle.sin()
    )
    c, s = torch.tensor(1.1).cos(), torch.tensor(1.1).sin()
    wanted = torch.stack((2 * c - 5 * s, 5 * c + 2 * s))
    torch.testing.assert_close(turned.flatten(), wanted)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("renormalize", [False, True], ids=["raw", "renormalized"])
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (19, 13, 3), (2, 5, 5)])
def test_route_equals_reference(
    device: torch.device,
    score: str,
    bias: bool,
    renormalize: bool,
    tokens: int,
    experts: int,
    top_k: int,
) -> None:
    assert_same(
        "route", randn(device, torch.float32, tokens, experts), top_k, score=score,
        bias_E=randn(device, torch.float32, experts) if bias else None,
        renormalize=renormalize, scale=2.5,
    )  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_norm_route_equals_reference(device: torch.device, dtype: torch.dtype, tokens: int) -> None:
    x, norm = randn(device, dtype, tokens, 200), randn(device, dtype, 200)
    weight = randn(device, dtype, 12, 200, scale=0.1)
    wanted_weight, wanted = REFERENCE.norm_route(x, norm, EPS, weight, 3, score="sigmoid")
    got_weight, got = opset("triton").norm_route(x, norm, EPS, weight, 3, score="sigmoid")
    torch.testing.assert_close(got_weight, wanted_weight, rtol=2e-2, atol=1e-3)
    # in bf16 a near-tie may be decided either way; the weights above then still agree
    if dtype == torch.float32:
        assert torch.equal(wanted, got)


def test_a_tie_goes_to_the_lowest_expert_and_nan_stays_in_range(device: torch.device) -> None:
    logits = torch.zeros(2, 6, device=device)
    logits[1] = float("nan")
    _, expert = opset("triton").route(logits, 3)
    assert expert[0].tolist() == [0, 1, 2]
    assert int(expert.min()) >= 0
    assert int(expert.max()) < 6


@pytest.mark.parametrize("rows", [0, 2], ids=["split", "rows"])
def test_norm_route_gives_ties_to_the_lowest_and_nan_a_place(
    device: torch.device, rows: int
) -> None:
    x = torch.zeros(2, 40, device=device)
    x[1] = float("nan")
    weight = randn(device, torch.float32, 6, 40)
    config = {"rows": rows, "split": 2, "block_h": 32, "stages": 2, "num_warps": 4}
    with tuning.forced("norm_route", config):
        value, expert = opset("triton").norm_route(x, torch.ones(40, device=device), EPS, weight, 3)
    assert expert[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(value[0], torch.full((3,), 1 / 3, device=device))
    assert len(set(expert[1].tolist())) == 3
    assert 0 <= int(expert[1].min()) <= int(expert[1].max()) < 6


@pytest.mark.parametrize(
    ("wanted", "groups", "waiting"),
    [(16, 1, 16), (16, 8, 16), (16, 9, 1), (131, 1, 131), (132, 1, 1)],
)
def test_waiting_programs_never_fill_the_gpu(wanted: int, groups: int, waiting: int) -> None:
    """The meta device counts as an H200: 132 multiprocessors."""
    assert waiting_programs(torch.device("meta"), wanted, groups) == waiting
    assert waiting_programs(torch.device("cpu"), wanted, groups) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [4, 16, 64, 512])
def test_programs_that_wait_for_one_another_repeat_and_end(
    device: torch.device, tokens: int
) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter runs one program after the other")
    x, gain = randn(device, torch.bfloat16, tokens, 2048), randn(device, torch.bfloat16, 2048)
    weight = randn(device, torch.bfloat16, 128, 2048, scale=0.02)
    wanted_value, wanted = opset("triton").norm_route(x, gain, EPS, weight, 8)
    for _ in range(200):
        value, expert = opset("triton").norm_route(x, gain, EPS, weight, 8)
        assert torch.equal(value, wanted_value)
        assert torch.equal(expert, wanted)


def test_route_reference_equals_transformers_routers() -> None:
    qwen = pytest.importorskip("transformers.models.qwen3_moe.modeling_qwen3_moe")
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    torch.manual_seed(1)
    x = torch.randn(9, 32)
    for renormalize in (True, False):
        config = qwen.Qwen3MoeConfig(
            hidden_size=32, num_experts=16, num_experts_per_tok=4, norm_topk_prob=renormalize
        )
        router = qwen.Qwen3MoeTopKRouter(config)
        torch.nn.init.normal_(router.weight)
        logits, weight, expert = router(x)
        got = route_ref(logits, 4, renormalize=renormalize)
        torch.testing.assert_close(got[0], weight)
        assert torch.equal(got[1], expert)
    router = mixtral.MixtralTopKRouter(
        mixtral.MixtralConfig(hidden_size=32, num_local_experts=8, num_experts_per_tok=2)
    )
    torch.nn.init.normal_(router.weight)
    logits, weight, expert = router(x)
    got = route_ref(logits, 2)
    torch.testing.assert_close(got[0], weight)
    assert torch.equal(got[1], expert)


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(
    ("top_k", "score", "message"),
    [(9, "softmax", r"top_k must be in 1\.\.8"), (0, "softmax", "got 0"), (2, "relu", "'relu'")],
)
def test_impossible_routing_is_refused(name: str, top_k: int, score: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        opset(name).route(torch.zeros(1, 8), top_k, score=score)


def test_unknown_op_set_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown op set 'cuda'; known: reference, triton"):
        opset("cuda")
