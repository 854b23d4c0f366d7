"""Proof of effect: what the workers have, and what their NCCL read, against what was asked."""

from pathlib import Path

import pytest

from autotune.backends.effective import (
    environment_problems,
    library_problems,
    nccl_log_problems,
    nccl_summary,
)
from autotune.nccl_log import parse_nccl_logs
from autotune.records import RankEnvironment

#: NCCL's own logs of 2 x H200, both ranks (see the file names for the settings)
LOGS = Path(__file__).parents[1] / "data" / "nccl_logs"
#: what the recording called shm_seed asked for
STORY = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "LL",
    "NCCL_MAX_NCHANNELS": "16",
    "NCCL_BUFFSIZE": "16777216",
    "NCCL_NTHREADS": "512",
    "NCCL_P2P_LEVEL": "SYS",
}


def rank(number: int, library: str = "/l/libnccl.so.2", **environment: str) -> RankEnvironment:
    return RankEnvironment(
        rank=number,
        pid=100 + number,
        environment=environment,
        nccl_library=library,
        nccl_version="2.28.9",
    )


@pytest.mark.parametrize(
    ("ranks", "problems"),
    [
        pytest.param([rank(0, NCCL_PROTO="LL"), rank(1, NCCL_PROTO="LL")], [], id="effective"),
        pytest.param(
            [rank(0, NCCL_PROTO="LL"), rank(1)],
            ["rank 1 has no NCCL_PROTO=LL (nccl.proto)"],
            id="one-rank-lost-it",
        ),
        pytest.param(
            [rank(0, NCCL_PROTO="LL"), rank(1, NCCL_PROTO="Simple")],
            ["rank 1 has NCCL_PROTO=Simple instead of NCCL_PROTO=LL (nccl.proto)"],
            id="one-rank-has-another",
        ),
        pytest.param(
            [rank(0, NCCL_PROTO="LL", NCCL_ALGO="Tree"), rank(1, NCCL_PROTO="LL")],
            ["rank 0 has NCCL_ALGO=Tree, but nccl.algo was left to NCCL"],
            id="a-setting-nobody-asked-for",
        ),
        pytest.param(
            [rank(0, NCCL_PROTO="LL")],
            ["1 of 2 workers told their environment"],
            id="a-silent-worker",
        ),
    ],
)
def test_a_setting_that_did_not_arrive_is_named(
    ranks: list[RankEnvironment], problems: list[str]
) -> None:
    assert environment_problems({"NCCL_PROTO": "LL"}, ranks, 2) == problems


def test_two_nccl_libraries_are_a_problem() -> None:
    assert library_problems([rank(0), rank(1)]) == []
    assert len(library_problems([rank(0), rank(1, library="/other/libnccl.so.2")])) == 1


def recorded(name: str, **environment: str) -> tuple[list[RankEnvironment], list[Path]]:
    """Ranks of a recording (their pids are of another machine) and its files."""
    files = [LOGS / f"{name}.rank{number}.log" for number in (0, 1)]
    return [rank(number, **environment) for number in (0, 1)], files


def test_settings_that_nccl_read_pass_and_a_level_without_p2p_is_not_missed() -> None:
    ranks, files = recorded("shm_seed", NCCL_P2P_DISABLE="1")
    assert nccl_log_problems(STORY, ranks, parse_nccl_logs(files)) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        pytest.param("shm_default", "rank 0: NCCL never read NCCL_ALGO=Ring", id="never-read"),
        pytest.param(
            "shm_ring_Simple",
            "rank 0: NCCL read NCCL_PROTO=Simple instead of LL",
            id="read-another-value",
        ),
    ],
)
def test_a_setting_that_nccl_did_not_read_is_named(name: str, problem: str) -> None:
    ranks, files = recorded(name, NCCL_P2P_DISABLE="1")
    found = nccl_log_problems(STORY, ranks, parse_nccl_logs(files))
    assert problem in found
    assert problem.replace("rank 0", "rank 1") in found


def test_a_rank_without_a_log_is_named() -> None:
    ranks, files = recorded("shm_seed", NCCL_P2P_DISABLE="1")
    found = nccl_log_problems(STORY, ranks, parse_nccl_logs(files[:1]))
    assert found == ["rank 1 (pid 101) wrote no NCCL log"]


def test_the_summary_tells_what_nccl_chose() -> None:
    _, files = recorded("shm_ring_LL_c16")
    summary = nccl_summary(parse_nccl_logs(files))
    assert summary["transports"] == ["SHM"]
    assert summary["channels"] == [16]
    assert summary["versions"] == ["2.28.9"]
    choices = summary["allreduce_choices"]
    assert isinstance(choices, list)
    assert {(choice["algo"], choice["proto"]) for choice in choices} == {("RING", "LL")}
