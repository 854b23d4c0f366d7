"""What there is to compile: every op at real sizes under every configuration that may be chosen."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kernels import tuning
from kernels.basic_cases import basic_cases
from kernels.candidates import candidates_for
from kernels.catalog import (
    KIMI_K2,
    MIXTRAL_8X7B_TP8,
    QWEN3_30B_A3B,
    Case,
    layer_cases,
    shard,
)
from kernels.compile_unit import Unit, unit_of
from kernels.cycle_cases import cycle_cases, draft_cases, draw_case, exchange_case, rank_case
from kernels.launch import programmatic_launch, recording
from kernels.opset import opset

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Entry:
    """One configuration of one case: what is forced (op -> configuration; empty: the defaults)."""

    case: Case
    dtype: torch.dtype
    forced: tuple[tuple[str, tuple[tuple[str, int], ...]], ...]

    @property
    def is_default(self) -> bool:
        """Whether this is what runs without tuning."""
        return not self.forced


def shipped_entries() -> Iterator[Entry]:
    """Every configuration of the shipped tables, at Qwen3's shapes and its own number of rows."""
    for path in sorted(tuning.SHIPPED.glob("*.json")):
        for table in tuning.load(path).values():
            for op, shapes in table.items():
                for key, config in shapes.items():
                    size = dict(part.split("=", 1) for part in key.split(","))
                    num_sequences, num_tokens = int(size.get("B", 1)), int(size["T"])
                    for case in layer_cases(QWEN3_30B_A3B, num_sequences, num_tokens, 1024):
                        if op in case.tuned:
                            yield Entry(case, torch.bfloat16, ((op, tuple(config.items())),))


def entries(fast: bool) -> Iterator[Entry]:
    """The defaults of every op (both models, both types), the candidates of tuning, the shipped."""
    sizes = ((1, 4), (1, 64)) if fast else ((1, 1), (1, 4), (16, 1), (1, 64), (2, 64))
    dims_list = (QWEN3_30B_A3B,) if fast else (QWEN3_30B_A3B, MIXTRAL_8X7B_TP8)
    for dims in dims_list:
        for num_sequences, num_tokens in sizes:
            for case in layer_cases(dims, num_sequences, num_tokens, 1024):
                yield Entry(case, torch.bfloat16, ())
    for case in basic_cases(QWEN3_30B_A3B, 1, 4, 1024):
        yield Entry(case, torch.bfloat16, ())
    yield Entry(draw_case(4, QWEN3_30B_A3B.vocab), torch.bfloat16, ())
    for num_rows in (1, 4):
        for case in draft_cases(QWEN3_30B_A3B, num_rows) + cycle_cases(QWEN3_30B_A3B, num_rows, 4):
            yield Entry(case, torch.bfloat16, ())
    for num_ranks in (2, 8):
        yield Entry(exchange_case(num_ranks), torch.bfloat16, ())
        yield Entry(rank_case(num_ranks, 4), torch.bfloat16, ())
    if fast:
        return
    for case in layer_cases(QWEN3_30B_A3B, 1, 4, 1024):
        yield Entry(case, torch.float32, ())
    for dims in (shard(QWEN3_30B_A3B, 2), shard(QWEN3_30B_A3B, 8), shard(KIMI_K2, 8)):
        for num_tokens in (1, 4, 16, 64):
            for case in layer_cases(dims, 1, num_tokens, 1024):
                if case.name in ("norm_route", "norm_moe_add"):
                    yield Entry(case, torch.bfloat16, ())
    for num_sequences, num_tokens in ((1, 1), (1, 4), (16, 1), (1, 64), (2, 64)):
        for case in layer_cases(QWEN3_30B_A3B, num_sequences, num_tokens, 1024):
            if case.name in ("norm_lm_head", "norm_linear_argmax", "linear_add"):
                # the kernels of norm_linear with other flags; the defaults above compile those
                continue
            for op in case.tuned:
                for config in candidates_for(op, QWEN3_30B_A3B, num_sequences, num_tokens):
                    yield Entry(case, torch.bfloat16, ((op, tuple(config.items())),))
    yield from shipped_entries()


def units_of(entry: Entry, pdl: bool) -> list[Unit]:
    """What the case launches under the entry's configuration."""
    forced = {op: dict(config) for op, config in entry.forced}
    with ExitStack() as stack:
        for op, config in forced.items():
            stack.enter_context(tuning.forced(op, config))
        stack.enter_context(programmatic_launch(pdl))
        launches = stack.enter_context(recording())
        entry.case.run(opset("triton"), entry.case.make(_META, entry.dtype))
    return [unit_of(launch) for launch in launches]


def collect(fast: bool, pdl: bool) -> dict[tuple[Any, ...], tuple[Unit, bool]]:
    """Distinct units -> (unit, whether a default configuration uses it)."""
    found: dict[tuple[Any, ...], tuple[Unit, bool]] = {}
    for entry in entries(fast):
        for unit in units_of(entry, pdl):
            default = entry.is_default or found.get(unit.key, (unit, False))[1]
            found[unit.key] = (unit, default)
    return found
