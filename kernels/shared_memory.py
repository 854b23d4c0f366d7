"""How much shared memory a configuration needs, and which configurations a GPU can run.

An upper bound from the tiles a kernel keeps in flight: ``STAGES - 1`` copies of its operand tiles,
plus what layout changes take. ``python -m kernels.compile_all`` checks it against every
configuration Triton compiles.
"""

from collections.abc import Mapping

from kernels.launch import pow2
from kernels.tuning import Config

#: reductions, broadcasts and alignment
_SLACK_BYTES = 4096
#: kernels without operand tiles: layout changes of one vector or one row
_PLAIN_BYTES = 24 * 1024


def _matrix(
    rows: int,
    columns: int,
    inner: int,
    stages: int,
    element_bytes: int,
    swapped: bool,
    tiles: int = 1,
) -> int:
    # a warp group's product reads a tile while all the others are being filled
    operands = (
        max(stages if swapped else stages - 1, 1) * (rows + tiles * columns) * inner * element_bytes
    )
    converted = 2 * rows * inner * element_bytes + rows * columns * 4
    return operands + converted + _SLACK_BYTES


def estimate(kernel: str, blocks: Mapping[str, int], element_bytes: int) -> int:
    """Upper bound in bytes for a kernel with these compile-time sizes (BLOCK_T, STAGES, ...)."""
    stages = blocks.get("STAGES", 1)
    swapped = bool(blocks.get("SWAP"))
    if kernel == "linear_matrix_kernel":
        # ways have a tile each, side by side
        inner = blocks["BLOCK_K"] * blocks.get("WAYS", 1)
        sizes = (blocks["BLOCK_T"], blocks["BLOCK_O"], inner)
        return _matrix(*sizes, stages, element_bytes, swapped)
    if kernel == "linear_route_matrix_kernel":
        # ways have a tile each, side by side
        inner = blocks["BLOCK_K"] * blocks.get("WAYS", 1)
        sizes = (blocks["BLOCK_T"], blocks["BLOCK_O"], inner)
        # the router's columns and their product change layout
        router = blocks["BLOCK_E"] * blocks["BLOCK_O"] * element_bytes
        product = blocks["BLOCK_E"] * blocks["BLOCK_T"] * 4
        return _matrix(*sizes, stages, element_bytes, swapped) + router + product
    if kernel == "gate_up_matrix_kernel":
        sizes = (blocks["BLOCK_T"], blocks["BLOCK_I"], blocks["BLOCK_H"])
        return _matrix(*sizes, stages, element_bytes, swapped, tiles=2)
    if kernel in ("down_stationary_kernel", "down_grouped_kernel"):
        sizes = (blocks["BLOCK_T"], blocks["BLOCK_O"], blocks["BLOCK_I"])
        return _matrix(*sizes, stages, element_bytes, swapped)
    if kernel == "norm_route_kernel":
        sizes = (blocks["BLOCK_T"], blocks["BLOCK_E"], blocks["BLOCK_H"])
        return _matrix(*sizes, stages, element_bytes, swapped)
    if kernel == "attention_kernel":
        head = 2 * blocks["BLOCK_HALF"]
        lines = max(stages - 1, 1) * blocks["BLOCK_L"]
        # the new tokens' keys and values are a tile of their own, after the cache's
        lines = max(lines, blocks.get("BLOCK_NEW", 0))
        return _attention(blocks["BLOCK_R"], blocks["BLOCK_L"], lines, head, element_bytes)
    return _PLAIN_BYTES


def _attention(rows: int, tile: int, lines: int, head: int, element_bytes: int) -> int:
    cache_tiles = 2 * lines * head * element_bytes
    query_and_scores = rows * (head + tile) * element_bytes
    return cache_tiles + query_and_scores + 8 * rows * tile + _SLACK_BYTES


def estimated_shared_bytes(
    op: str, config: Config, element_bytes: int, head_size: int, num_experts: int
) -> int:
    """``estimate`` for a configuration as the cache holds it."""
    if config.get("vector") or config.get("rows") or config.get("scheme") in (0, 3, 4):
        return _PLAIN_BYTES
    blocks = {
        "BLOCK_T": config.get("block_t", 16),
        "BLOCK_O": config.get("block_o", 0),
        "BLOCK_K": config.get("block_k", 0),
        "WAYS": config.get("ways", 1),
        "BLOCK_I": config.get("block_i", 0),
        "BLOCK_H": config.get("block_h", 0),
        "BLOCK_R": config.get("block_r", 0),
        "BLOCK_L": config.get("block_l", 0),
        "BLOCK_E": pow2(num_experts, 16),
        "BLOCK_HALF": pow2(head_size // 2, 16),
        "STAGES": config["stages"],
        "SWAP": config.get("swap", 0),
    }
    kernels = {
        "norm_linear": "linear_matrix_kernel",
        "linear_add": "linear_matrix_kernel",
        "linear_route": "linear_route_matrix_kernel",
        "lm_head": "linear_matrix_kernel",
        "norm_route": "norm_route_kernel",
        "moe_gate_up": "gate_up_matrix_kernel",
        "moe_down": "down_grouped_kernel",
        "qkv_attention": "attention_kernel",
        "tree_attention": "attention_kernel",
    }
    return estimate(kernels[op], blocks, element_bytes)


def fitting(
    op: str,
    configs: list[Config],
    limit_bytes: int,
    element_bytes: int,
    head_size: int,
    num_experts: int,
) -> list[Config]:
    """The configurations that surely fit ``limit_bytes`` of shared memory a block."""
    return [
        config
        for config in configs
        if estimated_shared_bytes(op, config, element_bytes, head_size, num_experts) <= limit_bytes
    ]
