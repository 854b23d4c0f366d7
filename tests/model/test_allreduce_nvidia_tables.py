"""Import of NVIDIA's tables: elements become bytes, ms become us, other rows are left out."""

from pathlib import Path

import pytest

from model.allreduce.data import read_records
from model.allreduce.nvidia_tables import read_nvidia_tables, records_of

PUBLISHED = Path(__file__).parents[2] / "studies/results/published/allreduce-published.csv"


def row(**change: object) -> dict[str, object]:
    values: dict[str, object] = {
        "device": "NVIDIA L40S", "op_name": "all_reduce", "kernel_source": "NCCL",
        "nccl_dtype": "half", "num_gpus": 8, "message_size": 256, "latency": 0.0226,
    }  # fmt: skip
    return values | change


def test_elements_become_bytes_and_ms_become_us_as_in_the_published_table() -> None:
    (record,) = records_of([row()], "nccl 2.27.3")
    published = next(
        r
        for r in read_records(PUBLISHED)
        if (r.gpu, r.nccl_version, r.num_ranks, r.size_bytes) == ("L40S", "2.27.3", 8, 512)
    )
    assert record.size_bytes == 512
    assert record.time_us == pytest.approx(published.time_us)
    assert record.nccl_version == "2.27.3"


def test_only_16_bit_all_reduces_are_taken() -> None:
    rows = [row(op_name="all_gather"), row(nccl_dtype="int8"), row(nccl_dtype="half")]
    assert len(records_of(rows, "nccl 2.27.3")) == 1


def test_a_frameworks_kernel_on_two_gpus_is_one_shot_and_nccl_on_more() -> None:
    change = {"nccl_dtype": None, "allreduce_dtype": "bfloat16", "backend": "sglang_eager"}
    two, eight = records_of([row(num_gpus=2, **change), row(num_gpus=8, **change)], "sglang 0.5.14")
    assert (two.backend, eight.backend) == ("one_shot", "nccl")
    assert not two.graphed
    assert two.nccl_version is None


def test_an_unknown_system_is_refused_naming_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "systems/data/l40s/comm").mkdir(parents=True)
    with pytest.raises(ValueError, match="'a30'; known: l40s"):
        read_nvidia_tables("a30", root=tmp_path)
    assert read_nvidia_tables("l40s", root=tmp_path) == []
