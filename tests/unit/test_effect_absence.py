"""A setting that is not in the log: lost, printed by nobody, misspelt, or not to be told."""

import io

import pytest

from autotune.effect.judge import judge_log
from autotune.effect.verdicts import Judgement, KnobVerdict
from autotune.nccl_log import parse_nccl_logs, parse_nccl_stream
from tests.unit.nccl_logs import RECORDED, rank_lines

NO = "not effective"
INSIDE = "inside NCCL"
NONE = "not a variable of this NCCL"
LOST = "between the shell and the workers"


def judged(lines: list[str], **expected: str) -> Judgement:
    return judge_log(parse_nccl_stream(io.BytesIO("\n".join(lines).encode()), "log"), expected)


def verdict_on(name: str, asked: str, lines: list[str]) -> KnobVerdict:
    return next(k for k in judged(lines, **{name: asked}).knobs if k.name == name)


def ranks(version: str = "2.27.7", num: int = 4, **more: object) -> list[str]:
    return [
        line
        for r in range(num)
        for line in rank_lines(version, r, num, **more)  # type: ignore[arg-type]
    ]


@pytest.mark.parametrize(
    ("name", "asked", "verdict", "reason", "lost_at"),
    [
        pytest.param("NCCL_PROTO", "LL", NO, "4 of 4 workers", LOST, id="lost"),
        pytest.param("NCCL_MIN_NCHANNELS", "8", NO, "never read it", LOST, id="number"),
        pytest.param(
            "NCCL_P2P_DISABLE", "0", "inert", "what it does by itself", None, id="prints-only-1",
        ),
        pytest.param("NCCL_PROTO", "", "inert", "an empty value is none", None, id="empty"),
        pytest.param(
            "NCCL_P2P_LEVEL", "sys", NO, "write SYS", INSIDE, id="level-in-lower-case",
        ),
        pytest.param(
            "NCCL_P2P_LEVEL", "FAR", NO, "one of LOC, NVL", INSIDE, id="no-level",
        ),
        pytest.param("NCCL_P2P_LEVEL", "SYS", NO, "never read it", LOST, id="level-lost"),
        pytest.param(
            "NCCL_MAX_NCHANELS", "4", NO, "did you mean NCCL_MAX_NCHANNELS?",
            NONE, id="misspelt",
        ),
        pytest.param(
            "NCCL_ALGORITHM", "Ring", NO, "did you mean NCCL_ALGO?",
            NONE, id="long-form",
        ),
        pytest.param(
            "nccl_proto", "LL", NO, "did you mean NCCL_PROTO?",
            "not a variable of NCCL", id="lower-case",
        ),
        pytest.param(
            "NCCL_LL_THRESHOLD", "16384", NO, "use NCCL_PROTO",
            NONE, id="removed",
        ),
        pytest.param(
            "NCCL_CTA_POLICY", "1", "unknown", "only where it needs it", None, id="read-lazily",
        ),
        pytest.param("NCCL_IB_TIMEOUT", "22", "inert", "to the network", None, id="network"),
        pytest.param("NCCL_SHM_DISABLE", "1", NO, "never read it", LOST, id="shm-in-use"),
        pytest.param("NCCL_ASYNC_ERROR_HANDLING", "1", "unknown", "PyTorch's", None, id="pytorch"),
        pytest.param("NCCL_TUNER_CONFIG_FILE", "x", "unknown", "tuner plugin's", None, id="plugin"),
        pytest.param("CUDA_VISIBLE_DEVICES", "0", "unknown", "not NCCL's", None, id="not-nccl"),
        pytest.param("NCCL_DEBUG", "INFO", "effective", "4 workers", None, id="debug-info"),
        pytest.param("NCCL_DEBUG", "WARN", NO, "level INFO", LOST, id="debug-warn"),
        pytest.param("NCCL_NET", "Socket", "unknown", "never prints it", None, id="never-printed"),
    ],
)  # fmt: skip
def test_a_value_without_a_line(
    name: str, asked: str, verdict: str, reason: str, lost_at: str | None
) -> None:
    found = verdict_on(name, asked, ranks())
    assert (found.verdict, found.lost_at) == (verdict, lost_at)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("name", "read", "asked", "verdict", "reason"),
    [
        pytest.param("NCCL_P2P_LEVEL", "SYS", "5", "inert", "no peer access", id="old-number"),
        pytest.param("NCCL_P2P_LEVEL", "PHB", "5", "not effective", "read PHB", id="other-level"),
        pytest.param("NCCL_MAX_NCHANNELS", "16", "0x10", "inert", "below 16", id="hexadecimal"),
        pytest.param("NCCL_BUFFSIZE", "16", "16MiB", "not effective", "knows no units", id="unit"),
        pytest.param("NCCL_NTHREADS", "0", "many", "not effective", "is no number", id="word"),
        pytest.param(
            "NCCL_ALGO", "allreduce:tree", "Ring", "not effective", "deterministic-inference",
            id="sglang-deterministic",
        ),
        pytest.param("NCCL_NVLS_ENABLE", "0", "1", "not effective", "SGLang", id="sglang-default"),
        pytest.param("NCCL_ALGO", "Tree", "Ring", "not effective", "set again by", id="by-whom"),
        pytest.param("NCCL_PROTO", "LL256", "LL256", "not effective", "refuse", id="unknown-word"),
    ],
)  # fmt: skip
def test_a_value_that_was_read(name: str, read: str, asked: str, verdict: str, reason: str) -> None:
    found = verdict_on(name, asked, ranks(env={name: read}))
    assert found.verdict == verdict
    assert reason in found.reason
    assert found.read == read


def test_a_variable_newer_than_the_library_is_told_as_such() -> None:
    found = verdict_on("NCCL_RUNTIME_CONNECT", "0", ranks("2.18.1"))
    assert (found.verdict, "came with NCCL 2.22" in found.reason) == ("not effective", True)
    assert verdict_on("NCCL_RUNTIME_CONNECT", "0", ranks("2.27.7")).verdict == "unknown"


def test_a_name_that_a_newer_library_may_know_is_not_called_unknown_to_it() -> None:
    assert "no variable" not in verdict_on("NCCL_NEW_THING", "1", ranks("2.35.1")).reason
    assert "no variable" in verdict_on("NCCL_NEW_THING", "1", ranks("2.30.7")).reason


def test_a_value_that_reached_some_workers_is_lost_on_the_way_to_the_others() -> None:
    lines = [*rank_lines("2.27.7", 0, 2, {"NCCL_PROTO": "LL"}), *rank_lines("2.27.7", 1, 2)]
    found = verdict_on("NCCL_PROTO", "LL", lines)
    assert (found.verdict, found.lost_at) == ("not effective", "on the way to some of the workers")
    assert "1 of 2 workers never read it (rank 1 (pid 4001))" in found.reason


def test_a_value_that_changed_between_communicators_is_told_with_both_lines() -> None:
    lines = rank_lines("2.27.7", 0, 2, {"NCCL_ALGO": "Ring"})
    lines += rank_lines("2.27.7", 0, 2, {"NCCL_ALGO": "Tree"}, comms=[("0x66", "0xb")])
    found = verdict_on("NCCL_ALGO", "Ring", lines)
    assert found.verdict == "not effective"
    assert "read Ring first and Tree for a later communicator" in found.reason
    assert len(found.evidence) == 2


def test_a_log_cut_before_the_communicator_is_up_proves_nothing() -> None:
    found = verdict_on("NCCL_PROTO", "LL", ranks(complete=False, tuning=False))
    assert (found.verdict, "Init COMPLETE" in found.reason) == ("unknown", True)


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        pytest.param([], "no line of NCCL's", id="empty"),
        pytest.param(["INFO: Started server"], "no line of NCCL's", id="no-nccl"),
        pytest.param(["NCCL version 2.27.5+cuda12.9"], "instead of VERSION", id="version-only"),
        pytest.param(["h:7:7 [0] enqueue.cc:1 NCCL WARN no"], "warnings only", id="warnings-only"),
    ],
)
def test_a_log_that_tells_nothing_says_what_is_missing(lines: list[str], reason: str) -> None:
    judgement = judged(lines, NCCL_PROTO="LL")
    (knob,) = judgement.knobs
    assert (knob.verdict, reason in knob.reason) == ("unknown", True)
    assert judgement.num_not_effective == 0
    assert any("NCCL_DEBUG=INFO" in note for note in judgement.notes)


def ray(lines: list[str], folded: int) -> list[str]:
    """One worker's lines as Ray shows them: equal lines of the others only counted."""
    tail = (
        f"\x1b[32m [repeated {folded}x across cluster] (Ray deduplicates logs by default.)\x1b[0m"
    )
    return [f"\x1b[36m(RayWorker pid=7)\x1b[0m {line}{tail if folded else ''}" for line in lines]


def test_lines_that_ray_folded_count_for_the_workers_they_stand_for() -> None:
    env = {"NCCL_BUFFSIZE": "16777216", "NCCL_PROTO": "LL"}
    lines = ray(rank_lines("2.27.7", 0, 8, env), 0) + ray(rank_lines("2.27.7", 1, 8, env), 7)
    judgement = judged(lines, **env)
    assert {k.name: k.read for k in judgement.knobs} == env
    assert all(k.verdict != "not effective" for k in judgement.knobs)
    assert any("RAY_DEDUP_LOGS=0" in note for note in judgement.notes)


def test_a_line_missing_from_a_folded_log_is_no_proof() -> None:
    env = {"NCCL_PROTO": "LL"}
    lines = ray(rank_lines("2.27.7", 0, 8, env), 0) + ray(rank_lines("2.27.7", 1, 8), 6)
    found = verdict_on("NCCL_PROTO", "LL", lines)
    assert (found.verdict, "RAY_DEDUP_LOGS=0" in found.reason) == ("unknown", True)


def test_two_settings_of_one_name_are_refused() -> None:
    from typer.testing import CliRunner

    from autotune.cli.env import app
    from autotune.errors import UserError

    log = str(RECORDED / "shm_seed.rank0.log")
    words = ["check", log, "--expect", "NCCL_PROTO=LL", "--expect", "NCCL_PROTO=Simple"]
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UserError)
    assert "choose one" in str(result.exception)


def symmetric(size: int) -> str:
    return (
        f"gpu-host:4000:4000 [0] NCCL INFO AllReduce [Symmetric]: {size} Bytes -> Kernel "
        "AllReduce_AGxLL_R nchannels 4 nthreads 512 nWorks 1"
    )


def test_symmetric_memory_kernels_make_the_protocol_inert() -> None:
    lines = ranks("2.28.9", tuning=False, env={"NCCL_PROTO": "LL"})
    found = verdict_on("NCCL_PROTO", "LL", [*lines, symmetric(4096), symmetric(16384)])
    assert (found.verdict, "symmetric-memory" in found.reason) == ("inert", True)


@pytest.mark.parametrize("machine", ["2x-h200-shm", "8x-l40s"])
def test_without_graphs_in_the_log_a_named_machine_tells_if_it_fits(machine: str) -> None:
    from autotune.lint.run import load_machine_named

    shown = ("Pattern", "|", "===", "+ ", "GPU/", "CPU/")
    lines = [
        line
        for line in (RECORDED / "shm_seed.rank0.log").read_text().splitlines()
        if not any(word in line for word in shown)
    ]
    log = parse_nccl_stream(io.BytesIO("\n".join(lines).encode()), "log")
    judgement = judge_log(log, {"NCCL_PROTO": "LL"}, machine=load_machine_named(machine))
    (proto,) = [k for k in judgement.knobs if k.name == "NCCL_PROTO"]
    assert proto.verdict == {"2x-h200-shm": "effective", "8x-l40s": "unknown"}[machine]
    if machine == "8x-l40s":
        assert "is not the host of the log: channels 2, not 4" in proto.reason


#: a host that no known machine is like, and one without NVLink
UNKNOWN_HOST = (("PCI[48.0]", "PCI[24.0]"), ("bw 20.000000/20.0", "bw 10.000000/10.0"))
NVLINK = ("NVL[", "NVS/")
LEVEL = ("NCCL_P2P_DISABLE set by environment to 1", "NCCL_P2P_LEVEL set by environment to SYS")
DIRECT = ("via SHM/direct/direct", "via P2P/IPC")


@pytest.mark.parametrize(
    ("name", "changes", "dropped", "verdict", "reason"),
    [
        pytest.param("NCCL_P2P_DISABLE", (), (), "effective", "changes what runs", id="nvlink"),
        pytest.param("NCCL_P2P_DISABLE", (), NVLINK, "inert", "PHB apart", id="host-bridge"),
        pytest.param(
            "NCCL_P2P_DISABLE", (), ("===", "+ ", "CPU/"), "unknown", "topology", id="no-topology"
        ),
        pytest.param(
            "NCCL_P2P_LEVEL", (LEVEL,), NVLINK, "inert", "driver gives no peer access", id="refused"
        ),
        pytest.param(
            "NCCL_P2P_LEVEL", (LEVEL, DIRECT), NVLINK, "effective", "changes", id="level-opens-p2p"
        ),
    ],
)
def test_what_decides_the_transport_is_judged_by_the_topology_of_the_log(
    name: str,
    changes: tuple[tuple[str, str], ...],
    dropped: tuple[str, ...],
    verdict: str,
    reason: str,
) -> None:
    """Without a machine the same communicator would stand for every transport."""
    text = "".join((RECORDED / f"shm_default.rank{rank}.log").read_text() for rank in (0, 1))
    for old, new in (*UNKNOWN_HOST, *changes):
        text = text.replace(old, new)
    kept = [line for line in text.splitlines() if not any(word in line for word in dropped)]
    judgement = judged(kept)
    assert [comm.machine for comm in judgement.comms] == [None]
    found = next(k for k in judgement.knobs if k.name == name)
    assert (found.verdict, reason in found.reason) == (verdict, True), found.reason


def test_lines_of_a_rank_without_its_beginning_are_no_worker_that_lost_something() -> None:
    lines = rank_lines("2.27.7", 0, 2, {"NCCL_MAX_NCHANNELS": "16"})
    fragment = [line for line in rank_lines("2.27.7", 1, 2) if " via " in line]
    found = verdict_on("NCCL_MAX_NCHANNELS", "16", [*lines, *fragment])
    assert found.verdict == "inert"


def test_every_recorded_log_is_judged_the_same_in_one_folder_and_by_file() -> None:
    files = [RECORDED / f"shm_seed.rank{rank}.log" for rank in (0, 1)]
    one = judge_log(parse_nccl_logs(files), {"NCCL_PROTO": "LL"})
    two = judge_log(parse_nccl_logs(files[::-1]), {"NCCL_PROTO": "LL"})
    assert {k.name: k.verdict for k in one.knobs} == {k.name: k.verdict for k in two.knobs}
