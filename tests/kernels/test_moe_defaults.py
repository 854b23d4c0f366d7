"""What the experts run with where nothing is tuned: sound for any model, shard and row count."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import moe_down, moe_gate_up, router, tuning
from kernels.catalog import KIMI_K2, QWEN3_30B_A3B, Dims, layer_cases, shard
from kernels.compile_unit import SHARED_LIMIT_BYTES
from kernels.launch import Launch, cdiv, recording
from kernels.moe_tiles import depth, pairs_each, row_warps, rows_of_expert, touched_experts
from kernels.opset import opset
from kernels.shared_memory import estimate

MIXTRAL = Dims(
    name="mixtral", hidden=4096, heads=32, kv_heads=8, head_size=128, experts=8, top_k=2,
    inter=14336, vocab=32000,
)  # fmt: skip
SHAPES = [shard(dims, ways) for dims in (QWEN3_30B_A3B, MIXTRAL, KIMI_K2) for ways in (1, 2, 4, 8)]
TOKENS = (1, 2, 3, 4, 8, 16, 17, 32, 64)
DTYPES = {torch.bfloat16: 2, torch.float32: 4}
MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Run:
    """The launches of one layer's experts and router with the defaults."""

    dims: Dims
    tokens: int
    element_bytes: int
    configs: dict[str, tuning.Config]
    launches: dict[str, Launch]


def every_run() -> list[Run]:
    runs = []
    for dims in SHAPES:
        for tokens in TOKENS:
            for dtype, element_bytes in DTYPES.items():
                configs: dict[str, tuning.Config] = {}
                launches: dict[str, Launch] = {}
                for case in layer_cases(dims, 1, tokens, 16):
                    if case.name not in ("norm_moe_add", "norm_route"):
                        continue
                    with recording() as found:
                        case.run(opset("triton"), case.make(torch.device("meta"), dtype))
                    launches |= {launch.kernel.__name__: launch for launch in found}
                    configs |= {op: tuning.last_used(op)[1] for op in case.tuned}
                runs.append(Run(dims, tokens, element_bytes, configs, launches))
    return runs


RUNS = every_run()


def sizes(launch: Launch) -> dict[str, int]:
    return {name: value for name, value in launch.meta.items() if isinstance(value, int)}


def test_they_fit_the_smallest_shared_memory() -> None:
    limit = min(SHARED_LIMIT_BYTES.values())
    for run in RUNS:
        for name, launch in run.launches.items():
            needed = estimate(name, sizes(launch), run.element_bytes)
            assert needed <= limit, (run.dims.name, run.tokens, run.element_bytes, name, needed)


def test_at_most_a_third_of_a_rows_lanes_is_masked() -> None:
    for run in RUNS:
        for launch in run.launches.values():
            for block, length in (("BLOCK_I", run.dims.inter), ("BLOCK_H", run.dims.hidden)):
                if block in launch.meta:
                    size = launch.meta[block]
                    covered = cdiv(length, size) * size
                    assert length >= covered * 2 / 3, (run.dims.name, run.tokens, launch.meta)


def test_every_warp_of_a_vector_kernel_has_a_part_of_the_row() -> None:
    """With more warps than parts, products wait for their vector to be handed round."""
    count = 0
    for run in RUNS:
        for name, block in (
            ("gate_up_vector_kernel", "BLOCK_H"),
            ("down_vector_kernel", "BLOCK_I"),
        ):
            if name in run.launches:
                meta = run.launches[name].meta
                assert meta["num_warps"] * 512 <= max(512, meta[block] * run.element_bytes)
                count += 1
    assert count > len(SHAPES)


def test_a_program_a_pair_only_where_few_tokens_share_an_expert() -> None:
    for run in RUNS:
        each = pairs_each(run.tokens, run.tokens * run.dims.top_k, run.dims.experts)
        by_pair = run.configs["moe_gate_up"]["vector"] == moe_gate_up.PAIR
        assert by_pair == (run.tokens == 1 or each <= 1.3)
        assert (run.configs["moe_down"]["scheme"] == moe_down.VECTOR) == by_pair
        assert run.configs["moe_gate_up"]["vector"] != moe_gate_up.SHARED


def test_tiles_of_tokens_have_their_norm_taken_first_and_hold_an_experts_tokens() -> None:
    for run in RUNS:
        config = run.configs["moe_gate_up"]
        if config["vector"] != moe_gate_up.MATRIX:
            continue
        assert config["norm_first"]
        each = pairs_each(run.tokens, run.tokens * run.dims.top_k, run.dims.experts)
        assert each <= config["block_t"] <= max(16, 4 * each)


def test_there_are_programs_for_every_multiprocessor() -> None:
    for run in RUNS:
        for name, launch in run.launches.items():
            if name.startswith(("gate_up", "down")):
                programs = launch.grid[0] * launch.grid[1]
                assert programs >= 0.9 * MULTIPROCESSORS, (run.dims.name, run.tokens, name)


def test_the_stationary_scheme_leaves_every_part_an_expert_and_takes_few_tokens() -> None:
    seen = False
    for run in RUNS:
        config = run.configs["moe_down"]
        if config["scheme"] == moe_down.STATIONARY:
            seen = True
            assert run.tokens <= moe_down.MAX_STATIONARY_TOKENS
            touched = touched_experts(run.tokens, run.dims.top_k, run.dims.experts)
            assert config["split"] <= touched
    assert seen


def test_the_router_takes_whole_rows_for_few_tokens_and_splits_for_more() -> None:
    for run in RUNS:
        config = run.configs["norm_route"]
        if config.get("rows"):
            assert run.tokens <= router.MAX_ROWS_TOKENS
        else:
            assert config["split"] * config["block_h"] <= run.dims.hidden


@pytest.mark.parametrize(
    ("block", "element_bytes", "wanted"),
    [(1024, 2, 4), (512, 2, 2), (128, 2, 1), (512, 4, 4), (16384, 2, 8)],
    ids=str,
)
def test_a_warp_has_512_bytes_of_a_row(block: int, element_bytes: int, wanted: int) -> None:
    assert row_warps(block, element_bytes) == wanted


@pytest.mark.parametrize(
    ("length", "most", "wanted"),
    [
        (768, 128, 128),
        (96, 128, 128),
        (192, 128, 64),
        (40, 128, 64),
        (1792, 128, 128),
        (80, 64, 16),
    ],
    ids=str,
)
def test_depth_takes_all_in_one_step_or_masks_hardly_any(
    length: int, most: int, wanted: int
) -> None:
    assert depth(length, most) == wanted


def shipped_moe() -> Iterator[tuple[dict[str, str], dict[str, tuning.Config]]]:
    """Every shape whose two halves are shipped for the H200: its sizes and configurations."""
    table = tuning.load(tuning.shipped_path("NVIDIA H200"))["NVIDIA H200"]
    assert table["moe_gate_up"].keys() == table["moe_down"].keys()
    for key in table["moe_down"]:
        sizes = dict(part.split("=") for part in key.split(","))
        yield sizes, {op: table[op][key] for op in ("moe_gate_up", "moe_down")}


def test_what_is_shipped_launches_and_fits_the_h200() -> None:
    widths = set()
    for given, configs in shipped_moe():
        dims = replace(QWEN3_30B_A3B, inter=int(given["I"]))
        widths.add(dims.inter)
        case = next(
            c for c in layer_cases(dims, int(given["T"]), 1, 16) if c.name == "norm_moe_add"
        )
        with ExitStack() as stack:
            for op, config in configs.items():
                stack.enter_context(tuning.forced(op, config))
            found = stack.enter_context(recording())
            case.run(opset("triton"), case.make(torch.device("meta"), torch.bfloat16))
        assert tuning.last_used("moe_down")[0] == tuning.shape_key(given)
        for launch in found:
            assert estimate(launch.kernel.__name__, sizes(launch), 2) <= SHARED_LIMIT_BYTES[90]
    # one GPU and shards of 2, 4 and 8
    assert widths == {768, 384, 192, 96}


def test_touched_experts_of_one_token_are_its_own_and_of_many_all() -> None:
    assert touched_experts(1, 8, 128) == pytest.approx(8)
    assert touched_experts(4, 8, 128) == pytest.approx(29.2, abs=0.1)
    assert touched_experts(10_000, 8, 128) == pytest.approx(128)
    assert [rows_of_expert(t, 2 * t, 8) for t in (4, 64, 200)] == [16, 32, 64]
