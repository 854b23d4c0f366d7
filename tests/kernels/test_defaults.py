"""What untuned shapes run with: it fits every GPU, reaches every input once and fills the GPU."""

from collections.abc import Iterator, Mapping

import pytest
import torch

from kernels import attention_kernel, linear, linear_route
from kernels.compile_unit import SHARED_LIMIT_BYTES
from kernels.launch import cdiv, num_multiprocessors
from kernels.shared_memory import estimated_shared_bytes

META = torch.device("meta")
SMALLEST = min(SHARED_LIMIT_BYTES.values())
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 256)
#: outputs x inputs: QKV, output projection and head of whole and sharded models, heads of drafts
MATRICES = (
    (5120, 2048), (2560, 2048), (1280, 2048), (768, 2048), (2048, 4096), (2048, 2048), (2048, 1024),
    (2048, 512), (151936, 2048), (75968, 2048), (18992, 2048), (6144, 4096), (4096, 4096),
    (768, 4096), (4096, 512), (32000, 4096), (2112, 7168), (7168, 8192), (7168, 1024),
    (163840, 7168), (5120, 4096), (2048, 6144), (12288, 2048), (333, 200), (48, 24), (9, 33),
)  # fmt: skip
#: query heads, key heads, head size
HEADS = (
    (32, 4, 128), (16, 2, 128), (8, 1, 128), (4, 1, 128), (32, 8, 128), (16, 1, 80), (12, 12, 96),
    (64, 8, 64), (8, 1, 256), (6, 2, 24), (64, 1, 192), (128, 8, 128),
)  # fmt: skip


def _matrices() -> Iterator[tuple[int, int, int, bool]]:
    for outputs, inputs in MATRICES:
        for tokens in TOKENS:
            for has_norm in (False, True):
                yield tokens, outputs, inputs, has_norm


def _parts_begin_inside(inputs: int, config: Mapping[str, int]) -> bool:
    """Whether the last of the parts that a kernel makes of its inputs has any (``PART``)."""
    split, block_k = config.get("split_k", 1) * config.get("ways", 1), config["block_k"]
    part = cdiv(inputs, split * block_k) * block_k
    return (split - 1) * part < inputs <= split * part


@pytest.mark.parametrize("element_bytes", [2, 4], ids=["16-bit", "32-bit"])
def test_linear_layers_fit_every_gpu_and_reach_every_input_once(element_bytes: int) -> None:
    for tokens, outputs, inputs, has_norm in _matrices():
        config = linear.default_config(tokens, outputs, inputs, element_bytes, has_norm=has_norm)
        label = (tokens, outputs, inputs, has_norm, dict(config))
        assert estimated_shared_bytes("norm_linear", config, element_bytes, 128, 128) <= SMALLEST, (
            label
        )
        assert _parts_begin_inside(inputs, config), label
        if config["vector"]:
            assert tokens <= linear.MAX_VECTOR_TOKENS, label


def _programs(config: dict[str, int], tokens: int, outputs: int) -> int:
    blocks = cdiv(outputs, config["block_o"]) * config.get("split_k", 1)
    return blocks * (1 if config["vector"] else cdiv(tokens, config["block_t"]))


def test_linear_layers_occupy_the_gpu_where_there_is_enough_to_read() -> None:
    for tokens, outputs, inputs, has_norm in _matrices():
        config = dict(linear.default_config(tokens, outputs, inputs, 2, has_norm=has_norm))
        programs = _programs(config, tokens, outputs)
        if outputs * inputs >= 1 << 21:
            # no more than three multiprocessors in ten may have nothing to do
            assert programs >= 0.7 * num_multiprocessors(META), (tokens, outputs, inputs, config)


def test_parts_are_added_up_only_where_blocks_alone_do_not_occupy_the_gpu() -> None:
    for tokens, outputs, inputs, has_norm in _matrices():
        config = linear.default_config(tokens, outputs, inputs, 2, has_norm=has_norm)
        if outputs >= 32_000 and not config["vector"]:
            assert config["split_k"] == 1, (tokens, outputs, inputs, dict(config))


@pytest.mark.parametrize("experts", [8, 60, 128, 256])
@pytest.mark.parametrize("element_bytes", [2, 4], ids=["16-bit", "32-bit"])
def test_the_joined_projection_fits_every_gpu_and_reaches_every_input_once(
    experts: int, element_bytes: int
) -> None:
    for outputs, inputs in MATRICES:
        for tokens in range(1, linear_route.MAX_TOKENS + 1):
            config = linear_route.default_config(tokens, outputs, inputs, experts, element_bytes)
            label = (tokens, outputs, inputs, experts, dict(config))
            needed = estimated_shared_bytes("linear_route", config, element_bytes, 128, experts)
            assert needed <= SMALLEST, label
            assert _parts_begin_inside(inputs, config), label


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("element_bytes", [2, 4], ids=["16-bit", "32-bit"])
def test_attention_fits_every_gpu_and_its_parts_are_not_all_idle(
    heads: tuple[int, int, int], element_bytes: int
) -> None:
    num_heads, num_kv_heads, head_size = heads
    for sequences in (1, 2, 4, 16, 64):
        for tokens in (1, 4, 16, 64):
            for rows in (64, 1028, 8192, 65536):
                each = tokens * num_heads // num_kv_heads
                groups = sequences * num_kv_heads
                config = attention_kernel.default_config(
                    groups, each, rows, head_size, element_bytes, META
                )
                label = (heads, sequences, tokens, rows, dict(config))
                needed = estimated_shared_bytes(
                    "qkv_attention", config, element_bytes, head_size, 1
                )
                assert needed <= SMALLEST, label
                assert 1 <= config["splits"] <= cdiv(rows, config["block_l"]), label
                assert config["block_r"] <= max(16, 2 * each), label


@pytest.mark.parametrize("op", ["norm_linear", "linear_route"])
def test_parts_side_by_side_need_a_tile_each(op: str) -> None:
    config = {"vector": 0, "block_t": 8, "block_o": 16, "block_k": 128, "stages": 3, "swap": 1}
    one = estimated_shared_bytes(op, config, 2, 128, 16)
    four = estimated_shared_bytes(op, config | {"ways": 4}, 2, 128, 16)
    # (8 + 16) rows of 128 bf16, twice or three times, for each of three more
    assert four - one >= 3 * 2 * 24 * 128 * 2
