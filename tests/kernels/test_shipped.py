"""The configurations shipped for a GPU: each runs at every size that would take it."""

import json
from collections.abc import Iterator

import pytest
import torch

from kernels import tuning
from kernels.launch import recording
from kernels.opset import opset

TRITON = opset("triton")
META = torch.device("meta")
OPS = ("norm_linear", "linear_add", "lm_head", "linear_route", "qkv_attention")


def _rows() -> Iterator[tuple[str, str, str, dict[str, int]]]:
    for path in sorted(tuning.SHIPPED.glob("*.json")):
        for gpu, ops in json.loads(path.read_text()).items():
            for op in OPS:
                for key, config in ops.get(op, {}).items():
                    yield gpu, op, key, config


def _tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def _call(op: str, size: dict[str, int]) -> None:
    tokens = size["T"]
    if op == "qkv_attention":
        rows, heads, kv_heads, width = size["B"] * tokens, size["N"], size["G"], size["D"]
        cache = _tensor(size["B"], 2048, kv_heads, width)
        ids = torch.empty(size["B"], dtype=torch.int64, device=META)
        table = torch.empty(4096, width, device=META)
        TRITON.qkv_attention(
            _tensor(rows, (heads + 2 * kv_heads) * width), _tensor(width), _tensor(width), 1e-6,
            torch.empty(rows, dtype=torch.int64, device=META), table, table, cache, cache, ids, ids,
            None, 0.1,
        )  # fmt: skip
        return
    x, w = _tensor(tokens, size["K"]), _tensor(size["O"], size["K"])
    if op == "norm_linear":
        TRITON.norm_linear(x, _tensor(size["K"]), 1e-6, w)
    elif op == "linear_add":
        TRITON.linear_add(x, w, _tensor(tokens, size["O"]))
    elif op == "lm_head":
        TRITON.norm_linear_argmax(x, _tensor(size["K"]), 1e-6, w)
    else:
        router = _tensor(size["E"], size["O"])
        TRITON.linear_route(x, w, _tensor(tokens, size["O"]), _tensor(size["O"]), 1e-6, router, 8)


@pytest.mark.parametrize(("gpu", "op", "key", "config"), list(_rows()), ids=lambda v: str(v)[:40])
def test_a_shipped_configuration_runs_at_every_size_that_takes_it(
    gpu: str, op: str, key: str, config: dict[str, int]
) -> None:
    size = {k: int(v) for k, v in (p.split("=") for p in key.split(",")) if k != "dtype"}
    # fewer tokens take the row of the next larger number
    for tokens in range(2 if size["T"] > 1 else 1, size["T"] + 1):
        at = ",".join(f"T={tokens}" if p.startswith("T=") else p for p in key.split(","))
        found, _ = tuning.lookup(gpu, op, at)
        if found != config:
            continue
        with recording() as launches, tuning.forced(op, config):
            _call(op, size | {"T": tokens})
        # what the table holds is what runs: no token is left out by a block that is too small
        blocks = launches[-1].meta if op != "lm_head" else launches[-2].meta
        grid = launches[-1].grid if op != "lm_head" else launches[-2].grid
        if op != "qkv_attention" and not config["vector"]:
            covered = blocks["BLOCK_T"] * (grid[2] if len(grid) > 2 else 1)
            assert covered >= tokens, (tokens, config)
