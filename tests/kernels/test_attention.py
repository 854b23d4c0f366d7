"""Attention over the slotted cache: chains, trees, split rows; alone and fused with its inputs."""

import pytest
import torch

from kernels import attention_combine, tuning
from kernels.opset import opset
from kernels.qkv_attention import MAX_NEW_TOKENS
from tests.kernels.helpers import REFERENCE, TRITON, assert_close, assert_same, randn

SLOTS, ROWS = 4, 70
#: node 7 is a padding root of its own
PARENTS = [-1, 0, 0, 1, 2, 2, 4, -1]


def caches(
    device: torch.device, dtype: torch.dtype, kv_heads: int, head_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = randn(device, dtype, 2, SLOTS, ROWS, kv_heads, head_size)
    # rows that nobody may read: the last one, and all of slot 3
    k[:, -1], v[:, -1], k[3], v[3] = (float("nan"),) * 4
    return k, v


def tree(device: torch.device, num_sequences: int, num_nodes: int) -> torch.Tensor:
    parent = torch.tensor(PARENTS[:num_nodes], device=device).repeat(num_sequences, 1)
    return REFERENCE.tree_mask(parent)[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "tokens", "prefix", "masked", "dtype"),
    [
        pytest.param(6, 2, 24, 5, [31, 0], True, torch.float32, id="odd-heads-and-an-empty-prefix"),
        pytest.param(4, 4, 64, 1, [60], False, torch.bfloat16, id="one-token"),
        pytest.param(8, 1, 32, 8, [1, 59], True, torch.bfloat16, id="eight-heads-on-one-key-head"),
        pytest.param(3, 1, 8, 6, [9, 2], False, torch.float32, id="causal"),
    ],
)
def test_tree_attention_equals_reference(
    device: torch.device,
    heads: int,
    kv_heads: int,
    head_size: int,
    tokens: int,
    prefix: list[int],
    masked: bool,
    dtype: torch.dtype,
) -> None:
    k, v = caches(device, dtype, kv_heads, head_size)
    slot = torch.tensor([2, 0, 1][: len(prefix)], device=device)
    q = randn(device, dtype, len(prefix), tokens, heads, head_size)
    mask = tree(device, len(prefix), tokens) if masked else None
    where = torch.tensor(prefix, device=device)
    assert_same("tree_attention", q, k, v, slot, where, mask, head_size**-0.5)


@pytest.mark.parametrize("sequences", [1, 2])
def test_one_position_for_all_tokens_may_come_expanded(
    device: torch.device, sequences: int
) -> None:
    """Nodes of one level of a tree share a position; such a vector has stride 0."""
    dtype, size, tokens = torch.float32, 16, 4
    k, v = caches(device, dtype, 2, size)
    angle = torch.rand(ROWS, size // 2, device=device).repeat(1, 2)
    prefix = torch.tensor([7, 30][:sequences], device=device)
    position = prefix[:, None].expand(-1, tokens).reshape(-1)
    assert (position.stride(0) == 0) == (sequences == 1)
    norm = randn(device, dtype, size)
    slot = torch.arange(8, device=device)[0::2][:sequences]
    mask = torch.eye(tokens, dtype=torch.bool, device=device).expand(sequences, -1, -1)
    qkv = randn(device, dtype, sequences * tokens, 8 * size)
    assert_same(
        "qkv_attention", qkv, norm, norm, 1e-6, position, angle.cos(), angle.sin(), k, v, slot,
        prefix, mask, 0.25,
    )  # fmt: skip
    q, key = qkv.view(-1, 8, size)[:, :4], qkv.view(-1, 8, size)[:, 4:6]
    got = TRITON.qk_norm_rope(q, key, norm, norm, 1e-6, position, angle.cos(), angle.sin())
    wanted = REFERENCE.qk_norm_rope(q, key, norm, norm, 1e-6, position, angle.cos(), angle.sin())
    for a, b in zip(got, wanted, strict=True):
        assert_close(a, b)


def test_a_vector_with_gaps_never_reaches_a_kernel() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="a vector of 8 elements has stride 2; make it contiguous"):
        TRITON.rms_norm(x, torch.ones(16)[::2], 1e-6)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: list[int], scale: float
) -> torch.Tensor:
    """One query head over chosen rows, written out."""
    weight = ((k[rows] @ q) * scale).softmax(0)
    return weight @ v[rows]


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_node_sees_the_prefix_its_ancestors_and_itself(device: torch.device, name: str) -> None:
    k, v = caches(device, torch.float32, 1, 8)
    q = randn(device, torch.float32, 1, 6, 1, 8)
    got = opset(name).tree_attention(
        q, k, v, torch.tensor([1], device=device), torch.tensor([10], device=device),
        tree(device, 1, 6), 0.5,
    )  # fmt: skip
    # node 5 hangs on node 2, which hangs on the root
    rows = [*range(10), 10, 12, 15]
    wanted = plain_attention(q[0, 5, 0], k[1, :, 0], v[1, :, 0], rows, 0.5)
    torch.testing.assert_close(got[0, 5, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_earlier_drafted_rows_are_masked_too(device: torch.device, name: str) -> None:
    """J > T: the second level of a draft tree sees only its own branch of the first."""
    k, v = caches(device, torch.float32, 1, 8)
    q = randn(device, torch.float32, 1, 2, 1, 8)
    mask = torch.tensor([[[True, False, True, False], [False, True, False, True]]], device=device)
    got = opset(name).tree_attention(
        q, k, v, torch.tensor([0], device=device), torch.tensor([7], device=device), mask, 0.5
    )
    for t, rows in enumerate(([*range(7), 7, 9], [*range(7), 8, 10])):
        wanted = plain_attention(q[0, t, 0], k[0, :, 0], v[0, :, 0], rows, 0.5)
        torch.testing.assert_close(got[0, t, 0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_a_query_that_sees_nothing_gets_zeros(device: torch.device, name: str) -> None:
    k, v = caches(device, torch.float32, 1, 8)
    q = randn(device, torch.float32, 2, 2, 1, 8)
    mask = torch.zeros(2, 2, 2, dtype=torch.bool, device=device)
    where = torch.zeros(2, dtype=torch.int64, device=device)
    got = opset(name).tree_attention(q, k, v, torch.tensor([0, 1], device=device), where, mask, 1.0)
    assert torch.equal(got, torch.zeros_like(got))


@pytest.mark.parametrize(
    "choice",
    [
        pytest.param({"splits": 1}, id="whole"),
        pytest.param({"splits": 1, "fold": 1}, id="one-part-with-the-new-tokens"),
        pytest.param({"splits": 3}, id="last-part-adds-up"),
        pytest.param({"splits": 3, "fold": 1, "ahead": 2}, id="last-part-adds-up-fold"),
        pytest.param({"splits": 3, "wait": 1}, id="others-wait"),
        pytest.param({"splits": 2, "fold": 1, "wait": 1, "num_warps": 4}, id="others-wait-fold"),
        pytest.param({"splits": 12, "wait": 1}, id="parts-without-rows"),
    ],
)
@pytest.mark.parametrize("op", ["tree_attention", "qkv_attention"])
def test_every_configuration_gives_the_same(
    device: torch.device, op: str, choice: dict[str, int]
) -> None:
    config = {"block_r": 16, "block_l": 16, "stages": 2, "num_warps": 1} | choice
    k, v = caches(device, torch.float32, 1, 16)
    slot, prefix = torch.tensor([1, 0], device=device), torch.tensor([50, 3], device=device)
    mask = tree(device, 2, 4)
    with tuning.forced(op, config):
        if op == "tree_attention":
            q = randn(device, torch.float32, 2, 4, 5, 16)
            assert_same(op, q, k, v, slot, prefix, mask, 0.25)
            # a second call finds what the first left: counters at zero, words empty
            assert_same(op, q.flip(0), k, v, slot, prefix, None, 0.25)
        else:
            qkv = randn(device, torch.float32, 8, 7 * 16)
            angle = torch.randn(ROWS, 8, device=device).repeat(1, 2)
            position = torch.arange(8, device=device)
            for rows in (qkv, qkv.flip(0)):
                assert_same(op, rows, None, None, 1e-6, position, angle.cos(), angle.sin(), k, v,
                            slot, prefix, mask, 0.25)  # fmt: skip


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_words_are_empty_again_after_every_kind_of_call(device: torch.device) -> None:
    k, v = caches(device, torch.float32, 1, 16)
    config = {"block_r": 16, "block_l": 16, "stages": 2, "num_warps": 2, "splits": 3, "wait": 1}
    q = randn(device, torch.float32, 2, 4, 5, 16)
    # a query that is not a number is answered, not waited for
    q[0, 0] = float("nan")
    slot, prefix = torch.tensor([1, 0], device=device), torch.tensor([50, 3], device=device)
    with tuning.forced("tree_attention", config):
        assert_same("tree_attention", q, k, v, slot, prefix, None, 0.25)
    words = attention_combine.empty_words(device, attention_combine.NUM_WORDS)
    assert bool((words.view(torch.int32) == attention_combine.EMPTY.value).all())


def test_more_words_than_there_are_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"needs 4194305 words; there are 4194304"):
        attention_combine.empty_words(device, attention_combine.NUM_WORDS + 1)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no-norm"])
@pytest.mark.parametrize(
    ("tokens", "own", "prefix"),
    [
        pytest.param(1, None, [33, 0], id="decode"),
        pytest.param(5, 5, [20, 3], id="tree"),
        pytest.param(2, 6, [20, 3], id="second-level-of-a-draft"),
    ],
)
def test_qkv_attention_equals_the_separate_ops(
    device: torch.device,
    dtype: torch.dtype,
    norm: bool,
    tokens: int,
    own: int | None,
    prefix: list[int],
) -> None:
    heads, kv_heads, head_size = 6, 2, 24
    k, v = caches(device, dtype, kv_heads, head_size)
    rows = tokens * len(prefix)
    qkv = randn(device, dtype, rows, (heads + 2 * kv_heads) * head_size)
    weight = randn(device, dtype, 2, head_size) if norm else (None, None)
    angle = torch.randn(40, head_size // 2, device=device).repeat(1, 2)
    mask = None
    if own is not None:
        mask = torch.rand(len(prefix), tokens, own, device=device) > 0.5
        mask[:, :, own - tokens :] |= torch.eye(tokens, dtype=torch.bool, device=device)
    arguments = (
        qkv, weight[0], weight[1], 1e-6, torch.arange(rows, device=device), angle.cos(),
        angle.sin(), k, v, torch.tensor([2, 0], device=device),
        torch.tensor(prefix, device=device), mask, head_size**-0.5,
    )  # fmt: skip
    assert_same("qkv_attention", *arguments)


def test_prefill_by_the_separate_ops_equals_fused_decode_of_the_last_token(
    device: torch.device,
) -> None:
    heads, kv_heads, head_size, length = 4, 2, 16, 9
    qkv = randn(device, torch.float32, length, (heads + 2 * kv_heads) * head_size)
    angle = torch.randn(length, head_size // 2, device=device).repeat(1, 2)
    cos, sin, position = angle.cos(), angle.sin(), torch.arange(length, device=device)
    slot, zero = torch.tensor([1], device=device), torch.tensor([0], device=device)
    k, v = caches(device, torch.float32, kv_heads, head_size)
    q_heads, k_heads, v_heads = qkv.view(length, -1, head_size).split([heads, 2, 2], dim=1)
    q, k_new = TRITON.qk_norm_rope(q_heads, k_heads, None, None, 1e-6, position, cos, sin)
    TRITON.store_kv(k_new[None], v_heads[None], k, v, slot, zero)
    whole = TRITON.tree_attention(q[None], k, v, slot, zero, None, 0.25)
    k2, v2 = caches(device, torch.float32, kv_heads, head_size)
    k2[1, : length - 1], v2[1, : length - 1] = k[1, : length - 1], v[1, : length - 1]
    last = TRITON.qkv_attention(
        qkv[-1:], None, None, 1e-6, position[-1:], cos, sin, k2, v2, slot,
        torch.tensor([length - 1], device=device), None, 0.25,
    )  # fmt: skip
    assert_close(last[0], whole[0, -1].flatten())
    assert_close(k2[1, length - 1], k[1, length - 1])


def test_sizes_out_of_range_are_refused() -> None:
    k = torch.zeros(1, 200, 2, 16)
    slot, prefix = torch.tensor([0]), torch.tensor([0])
    angle = torch.zeros(200, 16)
    many = MAX_NEW_TOKENS + 1
    with pytest.raises(ValueError, match=f"at most 64 new tokens a sequence, got {many}"):
        TRITON.qkv_attention(
            torch.zeros(many, 8 * 16), None, None, 1e-6, torch.arange(many), angle, angle, k, k,
            slot, prefix, None, 1.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"the scale must be positive, got -1\.0"):
        TRITON.tree_attention(torch.zeros(1, 1, 2, 16), k, k, slot, prefix, None, -1.0)
    for ops in (REFERENCE, TRITON):
        with pytest.raises(ValueError, match="3 query heads are not a multiple of 2 key heads"):
            ops.tree_attention(torch.zeros(1, 1, 3, 16), k, k, slot, prefix, None, 1.0)
        with pytest.raises(ValueError, match=r"must be \[1, 2, >= 2\], got \[1, 2, 1\]"):
            ops.tree_attention(
                torch.zeros(1, 2, 4, 16), k, k, slot, prefix, torch.ones(1, 2, 1).bool(), 1.0
            )
