"""What ``bench/dense_variants.py`` compares: shapes, and the configurations of each.

T tokens, O outputs, K inputs. A shape is of a "group": the whole model, one rank of two ("shard"),
or the EAGLE-3 head ("draft").
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from bench.tune_draft import SHAPES, case_of
from kernels import attention_kernel, linear, linear_route
from kernels.catalog import QWEN3_30B_A3B, Case, Dims, layer_cases
from kernels.tuning import Config

SHARD = replace(QWEN3_30B_A3B, name="shard", heads=16, kv_heads=2, vocab=75_968)
CONTEXT = 1024
_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One shape with its configurations; "table" is empty: what the op takes by itself.

    ``case(small)`` makes it, with a short vocabulary for compiling. ``sizes`` are the whole
    forwards (sequences, tokens each) in which it runs.
    """

    name: str
    group: str
    op: str
    case: Callable[[bool], Case]
    configs: dict[str, Config]
    sizes: tuple[tuple[int, int], ...] = field(default=())


def _matrix(*values: int) -> Config:
    names = ("block_t", "block_o", "block_k", "split_k", "stages", "num_warps", "swap")
    return {"vector": 0, "norm_first": 0} | dict(zip(names, values, strict=True))


def _tokens(block_o: int, block_k: int, ahead: int, num_warps: int) -> Config:
    return {"vector": 1, "block_o": block_o, "block_k": block_k, "ahead": ahead,
            "num_warps": num_warps}  # fmt: skip


def _vector(block_o: int, block_k: int, num_warps: int) -> Config:
    return {"vector": 1, "block_o": block_o, "block_k": block_k, "num_warps": num_warps}


#: block_t, block_o, block_k, split_k, stages, warps, swap
_FEW = (
    (8, 32, 128, 4, 5, 2, 1), (8, 64, 128, 4, 4, 4, 1), (16, 64, 64, 4, 6, 4, 1),
    (16, 64, 64, 8, 6, 4, 1),
)  # fmt: skip
_SIXTEEN = ((16, 64, 64, 4, 6, 4, 1), (16, 64, 128, 4, 4, 4, 1), (16, 64, 64, 8, 6, 4, 1))
#: ways, block_o, block_k, split_k, stages, warps: parts of the inputs side by side
_WAYS = (
    (4, 16, 128, 1, 4, 4), (4, 16, 256, 1, 2, 4), (4, 16, 256, 1, 3, 4), (8, 16, 128, 1, 3, 8),
    (8, 16, 256, 1, 2, 8), (8, 16, 256, 1, 3, 8), (2, 16, 256, 1, 4, 2), (4, 32, 128, 1, 3, 4),
    (4, 16, 64, 1, 6, 4), (8, 16, 128, 1, 4, 8), (4, 16, 128, 2, 4, 4),
)  # fmt: skip
#: block_o, block_k, ahead, warps
_TOKENS = ((8, 512, 1, 2), (8, 1024, 1, 4))
_VECTOR = ((8, 2048, 4), (4, 1024, 2), (2, 2048, 1), (1, 4096, 4), (2, 2048, 2), (4, 2048, 4))
_HEAD = ((16, 64, 128, 1, 5, 4, 1), (16, 64, 128, 1, 6, 4, 1), (16, 64, 64, 1, 8, 4, 1))
_ROUTE = ((8, 64, 128, 4, 4, 4, 1), (8, 32, 128, 4, 5, 2, 1), (8, 64, 64, 4, 6, 4, 1))
#: block_l, splits, fold, wait, ahead, stages, num_warps
_ATTENTION = (
    (64, 16, 0, 1, 1, 2, 4), (64, 16, 0, 1, 1, 2, 2), (64, 20, 0, 1, 1, 2, 4),
    (64, 6, 0, 0, 1, 3, 4), (64, 4, 0, 0, 1, 3, 4),
)  # fmt: skip


def _side_by_side(rows: int, whole: int) -> list[Config]:
    names = ("ways", "block_o", "block_k", "split_k", "stages", "num_warps")
    base = {"vector": 0, "norm_first": 0, "swap": 1, "block_t": 8 if rows <= 8 else 16}
    return [
        base | dict(zip(names, values, strict=True))
        for values in _WAYS
        if values[0] * values[2] * values[3] <= whole
    ]


def _named(configs: list[Config]) -> dict[str, Config]:
    def name(config: Config) -> str:
        kind = "v" if config.get("vector") else "m" if "block_o" in config else "a"
        shown = [v for k, v in config.items() if k not in ("vector", "norm_first")]
        return kind + "/".join(map(str, shown))

    return {name(config): config for config in configs}


def _linear_configs(op: str, rows: int, outputs: int, inputs: int) -> dict[str, Config]:
    default = linear.default_config(rows, outputs, inputs, 2, has_norm=op != "linear_add")
    ways = _side_by_side(rows, inputs)
    if rows == 1:
        found = [_vector(*v) for v in _VECTOR if v[1] <= inputs] + ways[:5]
    elif op == "lm_head":
        found = [_matrix(*v) for v in _HEAD if v[0] >= rows] + ways[:4]
    elif rows <= 8:
        found = [_matrix(*v) for v in _FEW] + [_tokens(*v) for v in _TOKENS] + ways
    else:
        found = [_matrix(*v) for v in _SIXTEEN] + ways
    return {"table": {}, "default": default} | _named(found)


def _attention_configs(dims: Dims, size: tuple[int, int]) -> dict[str, Config]:
    rows, groups = size[1] * dims.heads // dims.kv_heads, size[0] * dims.kv_heads
    default = attention_kernel.default_config(
        groups, rows, CONTEXT + size[1], dims.head_size, 2, _META
    )
    names = ("block_l", "splits", "fold", "wait", "ahead", "stages", "num_warps")
    found: list[Config] = []
    for block_r in (16, 32) if rows > 16 and size[0] > 1 else (16,):
        for values in _ATTENTION:
            if groups * values[1] <= 300:
                found.append({"block_r": block_r} | dict(zip(names, values, strict=True)))
    return {"table": {}, "default": default} | _named(found)


def _route_configs(rows: int) -> dict[str, Config]:
    default = linear_route.default_config(rows, 2048, 4096, 128, 2)
    found = [_matrix(*values) for values in _ROUTE if values[0] >= rows]
    found += _side_by_side(rows, 4096)
    return {"table": {}, "default": default} | _named(found)


def _layer_case(dims: Dims, size: tuple[int, int], name: str) -> Callable[[bool], Case]:
    def make(small: bool) -> Case:
        used = replace(dims, vocab=min(dims.vocab, 8192)) if small else dims
        return next(c for c in layer_cases(used, *size, CONTEXT) if c.name == name)

    return make


def _of_model(
    dims: Dims, group: str, size: tuple[int, int], names: tuple[str, ...]
) -> list[Choice]:
    rows, q_width = size[0] * size[1], dims.heads * dims.head_size
    width = q_width + 2 * dims.kv_heads * dims.head_size
    found = []
    for name in names:
        op = "lm_head" if name == "norm_lm_head" else name
        if op == "qkv_attention":
            configs = _attention_configs(dims, size)
        elif op == "linear_route":
            configs = _route_configs(rows)
        else:
            outputs, inputs = {
                "norm_linear": (width, dims.hidden),
                "linear_add": (dims.hidden, q_width),
                "lm_head": (dims.vocab, dims.hidden),
            }[op]
            configs = _linear_configs(op, rows, outputs, inputs)
        forwards = {4: ((1, 4), (4, 1))}.get(rows, (size,)) if op != "lm_head" else ()
        found.append(
            Choice(
                name=f"{group} {size[0]}x{size[1]} {name}", group=group, op=op,
                case=_layer_case(dims, size, name), configs=configs,
                sizes=(size,) if op == "qkv_attention" else forwards,
            )
        )  # fmt: skip
    return found


def _drafts(rows: int, names: tuple[str, ...]) -> Iterator[Choice]:
    for name in names:
        op, outputs, inputs, _ = SHAPES[name]

        def make(small: bool, name: str = name) -> Case:
            return case_of(name, rows)

        yield Choice(
            name=f"draft {rows} {name}", group="draft", op=op, case=make,
            configs=_linear_configs(op, rows, outputs, inputs),
        )  # fmt: skip


def _cases() -> Iterator[Choice]:
    """Every shape, the most valuable first."""
    whole, shard = QWEN3_30B_A3B, SHARD
    yield from _of_model(whole, "whole", (1, 4), ("norm_linear", "linear_route"))
    yield from _of_model(whole, "whole", (1, 1), ("norm_linear", "linear_add"))
    yield from _of_model(shard, "shard", (4, 1), ("norm_linear", "linear_add"))
    yield from _drafts(4, ("qkv", "down", "gate_up", "fc"))
    yield from _of_model(whole, "whole", (16, 1), ("norm_linear", "linear_route"))
    yield from _of_model(shard, "shard", (1, 1), ("norm_linear", "linear_add"))
    yield from _of_model(shard, "shard", (16, 1), ("norm_linear", "linear_add"))
    yield from _drafts(1, ("qkv", "down", "gate_up"))
    for dims, group, sizes in (
        (whole, "whole", ((1, 4), (4, 1), (1, 1))),
        (shard, "shard", ((1, 4), (4, 1), (1, 1), (16, 1))),
    ):
        for size in sizes:
            yield from _of_model(dims, group, size, ("qkv_attention", "norm_lm_head"))


CASES = tuple(_cases())
