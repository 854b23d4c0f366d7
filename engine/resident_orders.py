"""What rank 0 tells the other ranks' ``Resident``: lists of integers, one order a run of cycles."""

import torch

from engine.config import SpeculationConfig

START, PREPARE, RUN, PREPARE_PREFILL, PREFILL = range(5)


def start_order(speculation: SpeculationConfig, sampled: bool) -> list[int]:
    """Order: begin a run."""
    return [START, int(sampled), *speculation.model_dump_json().encode()]


def prepare_order(num_rows: int) -> list[int]:
    """Order: build the segments for a batch size."""
    return [PREPARE, num_rows]


def run_order(num_rows: int, num_cycles: int, plan_XB: torch.Tensor | None) -> list[int]:
    """Order: rearrange the rows if there is a plan, then run cycles."""
    plan = [] if plan_XB is None else plan_XB.flatten().tolist()
    return [RUN, num_rows, num_cycles, *plan]


def prepare_prefill_order(length: int, last: bool) -> list[int]:
    """Order: build the segment for chunks of a prompt."""
    return [PREPARE_PREFILL, length, int(last)]


def prefill_order(values: list[int], last: bool) -> list[int]:
    """Order: run a chunk of a prompt."""
    return [PREFILL, int(last), *values]
