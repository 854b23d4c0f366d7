"""The space holds every distinct possible knobs once, and nothing else."""

import itertools
from types import SimpleNamespace

import pytest

from autotune.errors import UserError
from autotune.knob_values import parse_dimension
from autotune.space import baseline_knobs, build_space
from model.spec import Knobs

GPU = SimpleNamespace(num_gpus=8)
CPU = SimpleNamespace(num_gpus=0)

LISTED = {
    "speculation.method": ("off", "eagle3"),
    "speculation.steps": (1, 2, 3),
    "speculation.topk": (1, 2, 4),
    "speculation.draft_tokens": (2, 4, 8, 64),
    "parallel.tp": (4, 8),
    "collectives.backend": ("nccl", "one_shot"),
    "nccl.proto": ("auto", "LL"),
    "nccl.min_channels": ("auto", 4, 8),
    "nccl.max_channels": ("auto", 2, 4),
    "cuda_graph.verify": (True, False),
}


def brute_force(listed: dict) -> set[Knobs]:
    found = set()
    for values in itertools.product(*listed.values()):
        try:
            found.add(Knobs.of(dict(zip(listed, values, strict=True))))
        except ValueError:
            continue
    return found


def test_a_space_equals_brute_force_over_the_raw_product() -> None:
    space = build_space(LISTED, GPU)
    enumerated = [space.at(index) for index in range(space.size)]
    assert len(set(enumerated)) == space.size
    assert set(enumerated) == brute_force(LISTED)


def test_every_knobs_knows_its_number() -> None:
    space = build_space(LISTED, GPU)
    for index in range(0, space.size, 7):
        assert space.index_of(space.at(index)) == index
    outside = Knobs.of({"speculation.method": "off", "parallel.tp": 2})
    assert outside not in space


def test_a_space_of_a_hundred_million_is_built_without_enumeration() -> None:
    listed = {
        **LISTED,
        "speculation.steps": tuple(range(1, 7)),
        "speculation.draft_tokens": tuple(range(2, 65)),
        "nccl.buffsize": ("auto", 1 << 20, 1 << 24),
        "nccl.nthreads": ("auto", 64, 256, 512),
        "nccl.p2p_level": ("auto", "PIX", "PHB", "SYS"),
        "host.numa_bind": (False, True),
        "cuda_graph.draft": (False, True),
        "engine.a": tuple(range(100)),
    }
    space = build_space(listed, GPU)
    assert space.size > 10**8
    some = space.sample(50, seed=3)
    assert len({knobs.id for knobs in some}) == 50
    assert all(knobs in space for knobs in some)
    assert some == space.sample(50, seed=3)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        pytest.param(
            {"nccl.min_channels": (8, 16), "nccl.max_channels": (1, 4)},
            "is above nccl.max_channels",
            id="channels",
        ),
        pytest.param(
            {
                "speculation.method": ("eagle3",),
                "speculation.steps": (1,),
                "speculation.topk": (2,),
                "speculation.draft_tokens": (9,),
            },
            "speculation.draft_tokens 9 .root included. must be between 2 and 3",
            id="tree-too-large",
        ),
        pytest.param({"parallel.tp": (3, 5)}, "parallel.tp 3 does not divide", id="tp"),
        pytest.param(
            {"speculation.method": ("eagle3",)}, "speculation.steps is missing", id="no-steps"
        ),
        pytest.param(
            {"speculation.steps": (2,), "speculation.topk": (1, 2)},
            "speculation.draft_tokens is missing",
            id="no-draft-tokens",
        ),
    ],
)
def test_an_impossible_space_is_refused_with_the_reason_that_kills_it(
    listed: dict, message: str
) -> None:
    def tp_problem(tp: int) -> str | None:
        return f"parallel.tp {tp} does not divide the heads" if tp % 2 else None

    with pytest.raises(UserError, match=message):
        build_space(listed, GPU, tp_problem)


def test_gpu_knobs_are_reported_inert_on_a_cpu_machine_and_do_not_multiply() -> None:
    space = build_space({**LISTED, "collectives.backend": ("nccl", "gloo")}, CPU)
    plain = {k: v for k, v in LISTED.items() if k.startswith(("speculation", "parallel"))}
    assert space.size == build_space(plain, CPU).size
    assert {item.knob for item in space.inert} == {
        "nccl.proto",
        "nccl.min_channels",
        "nccl.max_channels",
        "cuda_graph.verify",
    }
    assert {space.at(i).collectives_backend for i in range(space.size)} == {"gloo"}


def test_gpu_collectives_alone_are_refused_on_a_cpu_machine() -> None:
    with pytest.raises(UserError, match="needs GPUs and this machine has none; list gloo"):
        build_space({"collectives.backend": ("nccl",)}, CPU)


def test_the_baseline_is_plain_decoding_with_settings_left_alone() -> None:
    baseline = baseline_knobs(build_space(LISTED, GPU), LISTED)
    assert baseline.method == "off"
    assert baseline.nccl_proto == "auto"
    assert baseline.nccl_min_channels is None
    assert baseline.tp == 4


def test_nearest_is_possible_and_exact_where_it_can_be() -> None:
    space = build_space(LISTED, GPU)
    for index in range(0, space.size, 11):
        knobs = space.at(index)
        assert space.nearest(knobs.values()) == knobs
    odd = {"speculation.method": "eagle3", "speculation.steps": 9, "speculation.topk": 1}
    assert space.nearest(odd).steps == 3


def test_neighbours_differ_in_one_block_and_are_possible() -> None:
    space = build_space(LISTED, GPU)
    centre = space.at(5)
    around = list(space.neighbours(centre))
    assert around
    assert centre not in around
    assert all(knobs in space for knobs in around)


def test_a_backend_knob_takes_any_scalar_and_an_unknown_prefix_is_refused() -> None:
    assert parse_dimension("sglang.attention_backend", ["fa3", "triton"]) == ("fa3", "triton")
    with pytest.raises(ValueError, match="unknown knob"):
        parse_dimension("foo.bar", [1])


def test_listed_values_that_no_knobs_have_are_told() -> None:
    listed = {
        "speculation.method": ("off", "eagle3"),
        "speculation.steps": (1, 3),
        "speculation.topk": (1,),
        "speculation.draft_tokens": (4, 500),
        "parallel.tp": (8,),
        "nccl.proto": ("auto", "LL"),
    }
    space = build_space(listed, GPU)
    # topk 1 makes it steps + 1: 2 and 4
    assert space.unused == {"speculation.draft_tokens": (500,)}
