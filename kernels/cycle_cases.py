"""What begins, ends and follows cycles, as cases to compile: drafting, settling, several ranks.

Their inputs have the engine's types and sizes; nothing here measures or checks them.
"""

from typing import Any

import torch

from kernels.basic_cases import basic_case, random_values
from kernels.catalog import Case, Dims, Inputs
from kernels.exchange import Exchange, box_words, num_counters
from kernels.opset import OpSet

#: draws of synthetic acceptance before they repeat, and depths it has rates for
_NUM_DRAWS, _NUM_DEPTHS = 64, 3


def draft_cases(dims: Dims, num_rows: int) -> list[Case]:
    """The parts of an EAGLE-3 head of ``dims.hidden`` that are no attention and no matrix."""

    def embedded(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "token": torch.zeros(num_rows, dtype=torch.int64, device=device),
            "embed": random_values(device, dtype, 100, dims.hidden),
            "hidden": random_values(device, dtype, num_rows, dims.hidden),
            "norm": random_values(device, dtype, dims.hidden),
        }

    def picked(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "x": random_values(device, dtype, num_rows, dims.heads * dims.head_size),
            "y": random_values(device, dtype, num_rows, dims.hidden),
            "count": torch.zeros(1, dtype=torch.int64, device=device),
        }

    return [
        basic_case(
            "draft_input",
            embedded,
            lambda ops, i: ops.draft_input(
                i["token"], i["embed"], i["hidden"], i["norm"], i["norm"], 1e-6
            ),
        ),
        basic_case(
            "silu_product",
            lambda device, dtype: {"x": random_values(device, dtype, num_rows, 6 * dims.hidden)},
            lambda ops, i: ops.silu_product(i["x"]),
        ),
        basic_case("pick", picked, lambda ops, i: ops.pick(i["x"], i["y"], i["count"])),
    ]


def cycle_cases(dims: Dims, num_rows: int, num_nodes: int) -> list[Case]:
    """The end of a plain cycle and of a speculative one whose trees have ``num_nodes`` nodes."""

    def rows(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "state": torch.zeros(4, num_rows, dtype=torch.int64, device=device),
            "embed": random_values(device, dtype, dims.vocab, dims.hidden),
            "x": random_values(device, dtype, num_rows, dims.hidden),
            "norm": random_values(device, dtype, dims.hidden),
            "record": torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
        }

    def trees(device: torch.device, dtype: torch.dtype) -> Inputs:
        def numbers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return {
            "tree": numbers(num_rows, num_nodes),
            "row": numbers(num_rows),
            "one": numbers(1),
            "state": numbers(4, num_rows),
            "record": numbers(num_rows, 2 * num_nodes),
            "value": torch.zeros(num_rows, num_nodes, device=device),
            "uniform": torch.zeros(_NUM_DRAWS, num_rows, device=device),
            "rate": torch.zeros(_NUM_DEPTHS, device=device),
            "captured": random_values(device, dtype, num_rows * num_nodes, 3 * dims.hidden),
        }

    def settle(ops: OpSet, i: Inputs, draw: torch.Tensor | None) -> None:
        ops.settle(
            i["tree"], i["tree"], i["tree"], i["row"], i["row"], i["tree"], i["value"],
            i["state"], i["row"], i["record"], draw, _NUM_DRAWS,
        )  # fmt: skip

    def end(ops: OpSet, i: Inputs) -> Any:
        ops.force(i["tree"], i["tree"], i["tree"], i["uniform"], i["one"], i["rate"])
        settle(ops, i, None)
        settle(ops, i, i["one"])
        return ops.follow(i["tree"], i["tree"], i["row"], i["row"], i["captured"], num_nodes)

    return [
        basic_case(
            "finish",
            rows,
            lambda ops, i: ops.finish(
                i["x"], i["norm"], 1e-6, i["embed"], i["state"], i["record"], i["embed"], i["x"]
            ),
        ),
        basic_case("end of a speculative cycle", trees, end),
    ]


def rank_case(num_ranks: int, num_rows: int, hidden: int = 2048) -> Case:
    """The best token over ranks, for compiling."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        return {
            "token": torch.zeros(num_rows, dtype=torch.int64, device=device),
            "value": torch.zeros(num_rows, device=device),
            "pairs": torch.zeros(num_ranks, 2, num_rows, device=device),
            "state": torch.zeros(4, num_rows, dtype=torch.int64, device=device),
            "record": torch.zeros(num_rows, 1, dtype=torch.int64, device=device),
            "embed": random_values(device, dtype, 100, hidden),
            "next": random_values(device, dtype, num_rows, hidden),
        }

    def run(ops: OpSet, i: Inputs) -> Any:
        ops.finish_ranks(i["pairs"], i["state"], i["record"], i["embed"], i["next"])
        return ops.pair_best(i["token"], i["value"], 3), ops.best_of_ranks(i["pairs"])

    return basic_case(f"best of {num_ranks} ranks", make, run)


def draw_case(num_rows: int, vocabulary: int) -> Case:
    """Drawing tokens, for compiling."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        numbers = torch.zeros(num_rows, dtype=torch.int64, device=device)
        return {
            "logits": random_values(device, dtype, num_rows, vocabulary),
            "heat": torch.ones(num_rows, device=device),
            "seed": numbers,
            "position": numbers + 1,
        }

    return basic_case(
        "draw", make, lambda ops, i: ops.draw(i["logits"], i["heat"], i["seed"], i["position"], 7)
    )


def exchange_case(num_ranks: int, message_bytes: int = 1 << 18) -> Case:
    """A sum and a gather over ranks, for compiling: no rank can run it alone."""

    def make(device: torch.device, dtype: torch.dtype) -> Inputs:
        words = (box_words(num_ranks, message_bytes), num_counters(message_bytes))
        return {
            "x": random_values(device, dtype, 4, 2048),
            "box": torch.zeros(words[0], dtype=torch.int64, device=device),
            "counters": torch.zeros(words[1], dtype=torch.int32, device=device),
        }

    def run(_: OpSet, inputs: Inputs) -> Any:
        exchange = Exchange(
            inputs["box"],
            inputs["counters"],
            rank=1,
            num_ranks=num_ranks,
            message_bytes=message_bytes,
        )
        exchange.all_reduce(inputs["x"])
        return exchange.all_gather(inputs["x"])

    return basic_case(f"exchange of {num_ranks} ranks", make, run)
