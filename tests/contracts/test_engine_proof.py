"""The proof at a start: NCCL's choice is read at the sizes that the workload reduces."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from contract_harness import knobs, study_of

from autotune.backends.base import BackendFailure
from autotune.backends.engine_health import RecentHealth
from autotune.backends.engine_proof import allreduce_sizes, nccl_carries, prove
from autotune.records import Health
from engine.resident import bucket
from engine.results import WorkerEnvironment
from model.spec import Knobs

HIDDEN, ELEMENT = 512, 2
ROW = HIDDEN * ELEMENT
LL = Knobs.of({**knobs(2, "nccl").values(), "nccl.proto": "LL"})


@dataclass
class LoggedEngine:
    """Stands where two GPUs are missing: its all-reduces write what NCCL 2.28 writes."""

    folder: Path
    proto: str = "LL"
    read: str = "LL"
    sizes: list[int] = field(default_factory=list)

    def environment(self) -> tuple[WorkerEnvironment, ...]:
        return tuple(
            WorkerEnvironment(
                rank=rank,
                pid=100 + rank,
                environment={"NCCL_PROTO": "LL"},
                nccl_library="/lib/libnccl.so.2",
                nccl_version="2.28.9",
            )
            for rank in range(2)
        )

    def allreduce_bench(self, sizes_bytes: Sequence[int], repeats: int) -> None:
        self.sizes += sizes_bytes
        for rank in range(2):
            start = f"host:{100 + rank}:110 [{rank}] NCCL INFO "
            lines = [
                f"{start}NCCL version 2.28.9+cuda13.0",
                f"{start}NCCL_PROTO set by environment to {self.read}",
                f"{start}ncclCommInitRank comm 0x1 rank {rank} nranks 2 cudaDev {rank} nvmlDev "
                f"{rank} busId {rank}000 commId 0xabc - Init COMPLETE",
            ]
            if rank == 0:
                lines += [
                    f"{start}AllReduce: {size} Bytes -> Algo RING proto {self.proto} "
                    "channel{Lo..Hi}={0..3}"
                    for size in sizes_bytes
                    for _ in range(repeats)
                ]
            (self.folder / f"nccl.1.host.{100 + rank}.log").write_text("\n".join(lines) + "\n")

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("nccl.1.*.log"))


def sizes(**changes: object) -> tuple[int, ...]:
    space: dict[str, object] = {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": [1, 3],
        "speculation.topk": [1, 2],
        "speculation.draft_tokens": [4, 8],
        **changes,
    }
    study = study_of("engine", {}, None, space)
    return tuple(size // ROW for size in allreduce_sizes(study, HIDDEN, ELEMENT, bucket))


def test_the_sizes_are_those_of_decode_verify_and_prefill() -> None:
    # levels 1 and 2; chains of 2 and 4 tokens, trees of 4 and 8; a prompt of 24 padded to 64
    assert sizes() == (1, 2, 4, 8, 16, 64)


def test_without_speculation_only_decode_and_prefill_are_reduced() -> None:
    assert sizes(**{"speculation.method": ["off"]}) == (1, 2, 64)


def test_a_large_space_is_thinned_to_sizes_that_keep_both_ends() -> None:
    found = sizes(
        **{
            "speculation.steps": {"int": [1, 12]},
            "speculation.topk": [8],
            "speculation.draft_tokens": {"int": [2, 200]},
        }
    )
    assert len(found) == 48
    assert (found[0], found[-1]) == (1, 400)
    assert list(found) == sorted(set(found))


def test_every_size_has_its_choice_in_the_proof(tmp_path: Path) -> None:
    engine = LoggedEngine(tmp_path)
    asked = [1024, 8192, 1 << 20]
    proof = prove(engine, LL, logs=engine.logs, sizes_bytes=asked)
    assert engine.sizes == asked
    assert [rank.rank for rank in proof.ranks] == [0, 1]
    assert proof.nccl is not None
    rows = proof.nccl["allreduce_choices"]
    assert isinstance(rows, list)
    assert {row["bytes"]: (row["algo"], row["proto"]) for row in rows} == dict.fromkeys(
        asked, ("RING", "LL")
    )


def test_a_value_that_nccl_read_otherwise_fails_the_start(tmp_path: Path) -> None:
    engine = LoggedEngine(tmp_path, read="Simple")
    with pytest.raises(BackendFailure, match="rank 0: NCCL read NCCL_PROTO=Simple instead of LL"):
        prove(engine, LL, logs=engine.logs, sizes_bytes=[1024])


def test_one_rank_reduces_nothing_and_asks_for_nothing(tmp_path: Path) -> None:
    engine = LoggedEngine(tmp_path)
    proof = prove(engine, LL, logs=None, sizes_bytes=[1024])
    assert engine.sizes == []
    assert proof.nccl is None


def test_health_is_read_again_only_when_the_last_reading_is_old() -> None:
    readings = iter([(Health(device=f"reading {number}"),) for number in range(3)])
    health = RecentHealth(lambda: next(readings))
    assert health.recent()[0].device == "reading 0"
    assert health.recent()[0].device == "reading 0"
    assert health.now()[0].device == "reading 1"
    assert health.recent()[0].device == "reading 1"
    health._read_s -= 10
    assert health.recent()[0].device == "reading 2"


@pytest.mark.parametrize(
    ("device", "tp", "carrier", "expected"),
    [
        pytest.param("cuda", 2, "nccl", True, id="asked-for"),
        pytest.param("cuda", 2, "auto", True, id="the-default"),
        pytest.param("cuda", 1, "nccl", False, id="one-rank"),
        pytest.param("cuda", 2, "one_shot", False, id="our-own-kernel"),
        pytest.param("cuda", 2, "gloo", False, id="through-the-host"),
        pytest.param("cpu", 2, "gloo", False, id="cpu-ranks"),
    ],
)
def test_nccls_log_is_asked_only_where_nccl_carries_the_sums(
    device: str, tp: int, carrier: str, expected: bool
) -> None:
    assert nccl_carries(device, knobs(tp, carrier)) == expected
