"""Writing and compacting the cache, tree masks, and rows that lie beyond 2^31 elements."""

import pytest
import torch

from kernels.opset import opset
from kernels.tree import MAX_NODES
from tests.kernels.helpers import TRITON, assert_same, randn


@pytest.mark.parametrize(("kv_heads", "head_size", "tokens"), [(2, 24, 3), (1, 7, 1), (8, 128, 2)])
def test_store_kv_equals_reference(
    device: torch.device, dtype: torch.dtype, kv_heads: int, head_size: int, tokens: int
) -> None:
    k, v = randn(device, dtype, 2, 3, tokens, kv_heads, head_size)
    k_cache, v_cache = randn(device, dtype, 2, 5, 20, kv_heads, head_size)
    slot = torch.tensor([4, 0, 2], device=device)
    start = torch.tensor([0, 17, 20 - tokens], device=device)
    assert_same("store_kv", k, v, k_cache, v_cache, slot, start)


@pytest.mark.parametrize(("sequences", "tokens"), [(3, 1), (1, 4), (2, 3), (1, 1)])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_store_kv_takes_values_that_lie_beside_queries_and_keys(
    device: torch.device, sequences: int, tokens: int, kv_heads: int
) -> None:
    n, d = 4, 16
    qkv = randn(device, torch.float32, sequences * tokens, n + 2 * kv_heads, d)
    v = qkv[:, n + kv_heads :].reshape(sequences, tokens, kv_heads, d)
    # a dimension of size 1 may carry any stride
    strides = [s if size > 1 else 7 for s, size in zip(v.stride(), v.shape, strict=True)]
    v = v.as_strided(v.shape, strides, v.storage_offset())
    (k,) = randn(device, torch.float32, 1, sequences, tokens, kv_heads, d)
    k_cache, v_cache = randn(device, torch.float32, 2, 5, 20, kv_heads, d)
    slot = torch.arange(sequences, device=device) + 1
    assert_same("store_kv", k, v, k_cache, v_cache, slot, slot * 2)


def test_store_kv_refuses_sequences_with_a_gap(device: torch.device) -> None:
    k, v = randn(device, torch.float32, 2, 2, 4, 1, 8)
    k_cache, v_cache = randn(device, torch.float32, 2, 5, 20, 1, 8)
    slot = torch.arange(2, device=device)
    with pytest.raises(ValueError, match="sequences must follow each other"):
        TRITON.store_kv(k[:, :3], v[:, :3], k_cache, v_cache, slot, slot)


@pytest.mark.parametrize("width", [(1, 1), (2, 100), (5, 128)], ids=["1", "200", "640"])
@pytest.mark.parametrize(
    ("start", "source", "count"),
    [
        pytest.param([5], [[0, 1, 2]], [3], id="already-dense"),
        pytest.param([5], [[0, 2, 3, 6]], [4], id="a-row-is-read-then-overwritten"),
        pytest.param([0, 8], [[0, 3, -1], [0, 1, 4]], [2, 3], id="two-sequences-padded"),
        pytest.param([3], [[0, -1, -1]], [1], id="only-the-root"),
        pytest.param([3], [[4, 5]], [0], id="nothing"),
    ],
)
def test_kv_compact_equals_reference(
    device: torch.device,
    start: list[int],
    source: list[list[int]],
    count: list[int],
    width: tuple[int, int],
) -> None:
    cache = randn(device, torch.float32, 3, 3, 16, *width)
    slot = torch.tensor([2, 0][: len(start)], device=device)
    tensors = [torch.tensor(x, device=device) for x in (start, source, count)]
    assert_same("kv_compact", cache, slot, *tensors)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_kv_compact_keeps_the_accepted_rows_in_order(device: torch.device, name: str) -> None:
    cache = torch.arange(12.0, device=device).view(1, 1, 12, 1, 1).clone()
    one = torch.tensor([0], device=device)
    source = torch.tensor([[0, 2, 5, -1]], device=device)
    opset(name).kv_compact(cache, one, one + 4, source, one + 3)
    assert cache.flatten().tolist()[:7] == [0, 1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_tree_mask_equals_reference(device: torch.device, nodes: int) -> None:
    torch.manual_seed(nodes)
    parent = torch.full((3, nodes), -1, dtype=torch.int64)
    for t in range(1, nodes):
        parent[:, t] = torch.randint(-1, t, (3,))
    assert_same("tree_mask", parent.to(device))


def test_a_tree_that_is_too_large_is_refused() -> None:
    parent = torch.zeros(1, MAX_NODES + 1, dtype=torch.int64)
    with pytest.raises(ValueError, match="at most 1024 nodes a tree, got 1025"):
        TRITON.tree_mask(parent)


@pytest.mark.gpu
def test_offsets_beyond_32_bits(device: torch.device) -> None:
    """A cache of more than 2^31 elements: its last slot is written and read back."""
    slots, rows = 17, 2**20
    cache = torch.zeros(slots, rows, 1, 128, dtype=torch.bfloat16, device=device)
    assert cache.numel() > 2**31
    k = randn(device, torch.bfloat16, 1, 2, 1, 128)
    slot = torch.tensor([slots - 1], device=device)
    start = torch.tensor([rows - 2], device=device)
    TRITON.store_kv(k, k, cache, cache, slot, start)
    assert torch.equal(cache[-1, -2:], k[0])
    assert not bool(cache[0].any())
