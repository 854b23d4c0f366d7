"""The parser takes NCCL's logs whole, cut, interleaved and damaged."""

import io
import random
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.nccl_log import parse_nccl_logs, parse_nccl_stream
from autotune.nccl_log_types import NcclLog

DATA = Path(__file__).parents[1] / "data" / "nccl_logs"
LOGS = sorted(DATA.glob("*.log"))
RANK0 = [path for path in LOGS if "rank0" in path.name]


def parse(text: str | bytes) -> NcclLog:
    data = text.encode() if isinstance(text, str) else text
    return parse_nccl_stream(io.BytesIO(data), "log")


def info(message: str, pid: int = 7, tid: int = 7) -> str:
    return f"host-1:{pid}:{tid} [0] NCCL INFO {message}\n"


@pytest.mark.parametrize("path", RANK0, ids=lambda path: path.stem)
def test_a_whole_log_gives_everything_of_interest(path: Path) -> None:
    text = path.read_text()
    (process,) = parse_nccl_logs([path]).processes
    (comm,) = process.comms
    assert (process.host, process.version) == ("vm", "2.28.9+cuda13.0")
    assert (comm.rank, comm.num_ranks, comm.num_nodes, comm.complete) == (0, 2, 1, True)
    assert comm.bus_id == "60"
    assert [graph.pattern for graph in comm.graphs] == [4, 1]
    assert comm.coll_channels == len(comm.rings) == len(comm.ring_neighbours) == len(comm.trees)
    assert comm.rings[0] == (0, 1)
    assert sum(choice.count for choice in process.choices) == text.count(" Bytes -> Algo")
    assert set(process.environment) == {
        word for word in text.split() if word.startswith("NCCL_") and f"{word} set by env" in text
    }
    assert comm.transport == ("P2P" if "nvlink" in path.name else "SHM")
    assert len(comm.model) == 5 * 7 * 3
    has_matrix = "Enabled NCCL" in text
    assert len(comm.enabled) == (5 if has_matrix else 0)
    assert comm.topology[0].startswith("=== System")


def test_evidence_names_file_and_line() -> None:
    path = DATA / "shm_seed.rank0.log"
    (process,) = parse_nccl_logs([path]).processes
    lines = path.read_text().splitlines()
    for read in process.env:
        assert f"{read.name} set by environment to {read.value}" in lines[read.evidence.line - 1]
        assert read.evidence.file == str(path)
    for choice in process.choices:
        assert f": {choice.size_bytes} Bytes -> " in lines[choice.evidence.line - 1]
    comm = process.comms[0]
    assert "coll channels" not in lines[comm.evidence.line - 1]
    assert "Pattern 4" in lines[comm.graphs[0].evidence.line - 1]
    entry = comm.entry("Ring", "LL")
    assert entry is not None
    assert (entry.latency_us, entry.bandwidth) == (8.6, 20.0)
    assert "AllReduce |" in lines[entry.evidence.line - 1]


def test_the_enabled_matrix_is_read_from_its_lines_without_prefix() -> None:
    (process,) = parse_nccl_logs([DATA / "shm_ring_LL128.rank0.log"]).processes
    row = next(row for row in process.comms[0].enabled if row.function == "AllReduce")
    assert row.protocols == {"LL": 0, "LL128": 1, "Simple": 0}
    assert row.algorithms["Ring"] == 1
    assert sum(row.algorithms.values()) == 1


def test_a_folder_stands_for_its_files_and_ranks_stay_apart() -> None:
    log = parse_nccl_logs([DATA])
    ranks = sorted(comm.rank for p in log.processes for comm in p.comms if comm.rank is not None)
    assert ranks == [0] * 7 + [1] * 7
    assert len(list(log.by_rank(1))) == 7
    assert log.versions == ("2.28.9",)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(UserError, match="no NCCL log at /nowhere"):
        parse_nccl_logs(["/nowhere"])


def one_of_each() -> bytes:
    """A short log with one line of every kind."""
    text = (DATA / "shm_seed.rank0.log").read_text()
    kept, seen = [], set()
    for line in text.splitlines():
        kind = line.split("NCCL INFO ")[-1].split()[:1] if "NCCL INFO" in line else [line[:20]]
        # the table's rows are alike: the all-reduce stands for them
        if tuple(kind) not in seen and kind not in (["Broadcast"], ["Reduce"], ["AllGather"]):
            seen.add(tuple(kind))
            kept.append(line)
    return "\n".join(kept).encode() + b"\n"


def test_a_log_cut_at_every_byte_never_raises() -> None:
    data = one_of_each()
    assert len(data) > 3000
    for cut in range(len(data)):
        parts = [data[:cut], data[cut:]] if cut % 5 == 0 else [data[:cut]]
        for part in parts:
            for process in parse(part).processes:
                # a cut may shorten a word, never invent one
                assert {choice.proto for choice in process.choices} <= {"L", "LL"}


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem)
def test_whole_logs_cut_anywhere_never_raise_nor_gain(path: Path) -> None:
    data = path.read_bytes()
    whole = parse(data)
    total = sum(choice.count for p in whole.processes for choice in p.choices)
    for cut in range(0, len(data), 331):
        heads, tails = (
            sum(choice.count for p in parse(part).processes for choice in p.choices)
            for part in (data[:cut], data[cut:])
        )
        assert total - 1 <= heads + tails <= total + 1


@pytest.mark.parametrize("seed", range(6))
def test_interleaved_ranks_in_one_file_come_apart(seed: int) -> None:
    chance = random.Random(seed)
    files = [DATA / "shm_default.rank0.log", DATA / "shm_default.rank1.log"]
    queues = [path.read_text().splitlines(keepends=True) for path in files]
    mixed = []
    while any(queues):
        queue = chance.choice([q for q in queues if q])
        mixed.append(queue.pop(0))
    together = parse("".join(mixed))
    apart = parse_nccl_logs(files)
    for one, other in zip(
        sorted(together.processes, key=lambda p: p.pid or 0), apart.processes, strict=True
    ):
        assert (one.pid, one.environment) == (other.pid, other.environment)
        assert [c.size_bytes for c in one.choices] == [c.size_bytes for c in other.choices]
        a, b = one.comms[0], other.comms[0]
        assert (a.rank, a.coll_channels, a.rings, a.trees) == (
            b.rank, b.coll_channels, b.rings, b.trees,
        )  # fmt: skip
        assert [(t.via, t.num_channels) for t in a.transports] == [
            (t.via, t.num_channels) for t in b.transports
        ]


@pytest.mark.parametrize("seed", range(8))
def test_binary_garbage_between_and_within_lines_is_passed_over(seed: int) -> None:
    chance = random.Random(seed)
    lines = (DATA / "shm_seed.rank0.log").read_bytes().splitlines(keepends=True)
    dirty = []
    for line in lines:
        if chance.random() < 0.3:
            dirty.append(chance.randbytes(chance.choice([1, 40, 5000])) + b"\n")
        dirty.append(line)
    clean = parse(b"".join(lines)).processes[0]
    found = next(p for p in parse(b"".join(dirty)).processes if p.pid == clean.pid)
    assert found.environment == clean.environment
    assert len(found.choices) == len(clean.choices)
    data = bytearray(b"".join(lines))
    for _ in range(400):
        data[chance.randrange(len(data))] = chance.randrange(256)
    parse(bytes(data))
    parse(chance.randbytes(200_000))


def test_two_messages_on_one_line_are_both_read() -> None:
    first = info("NCCL_MAX_NCHANNELS set by environment to 16.").rstrip("\n")
    second = info("NCCL_PROTO set by environment to LL", pid=8, tid=8)
    log = parse(first + second)
    assert [p.environment for p in log.processes] == [
        {"NCCL_MAX_NCHANNELS": "16"}, {"NCCL_PROTO": "LL"},
    ]  # fmt: skip


def test_a_prefix_cut_into_belongs_to_the_known_process() -> None:
    log = parse(
        info("NCCL_PROTO set by environment to LL", 661, 661)
        + "host-1:66" + info("NCCL_ALGO set by environment to Ring", 661, 661)
    )  # fmt: skip
    (process,) = log.processes
    assert process.environment == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("message", "choice"),
    [
        pytest.param(
            "14336 Bytes -> Algo 1 proto 0 time 37.2",
            ("unknown", 14336, "RING", "LL", -1), id="2.20-to-2.22",
        ),
        pytest.param(
            "AllReduce: 14336 Bytes -> Algo 0 proto 2 time 37.2",
            ("AllReduce", 14336, "TREE", "SIMPLE", -1), id="2.23",
        ),
        pytest.param(
            "AllReduce: 14336 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..3}",
            ("AllReduce", 14336, "RING", "LL128", 3), id="2.24-to-2.30",
        ),
        pytest.param(
            "AllReduce: 8 Bytes -> Algo NVLS proto SIMPLE channel{Lo..Hi}={0..15} cgaClusterSize 4",
            ("AllReduce", 8, "NVLS", "SIMPLE", 15), id="2.32",
        ),
        pytest.param(
            "AllReduce [Symmetric]: 64 Bytes -> Kernel AllReduce_AGxLL_R nchannels 4 nthreads 512",
            ("AllReduce", 64, "SYMMETRIC", "AllReduce_AGxLL_R", 3), id="symmetric",
        ),
    ],
)  # fmt: skip
def test_choice_lines_of_all_versions(message: str, choice: tuple[object, ...]) -> None:
    (process,) = parse(info(message) * 3).processes
    (found,) = process.choices
    assert (
        found.function, found.size_bytes, found.algo, found.proto, found.channel_high,
    ) == choice  # fmt: skip
    assert found.count == 3


@pytest.mark.parametrize(
    ("message", "comm"),
    [
        (
            "comm 0x55 rank 3 nranks 8 cudaDev 3 busId 41000 commId 0x9 - Init COMPLETE",
            ("0x55", 3, 8, True),
        ),
        (
            "ncclCommInitRank comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 41000 commId 0x9 "
            "- Init COMPLETE",
            ("0x55", 3, 8, True),
        ),
        (
            "[Rank 3] ncclCommInitRankConfig comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 4 "
            "commId 0x9 - Init START",
            ("0x55", 3, 8, False),
        ),
        (
            "ncclCommSplit comm 0x55 rank 3 nranks 8 cudaDev 3 nvmlDev 3 busId 4 parent 0x5 "
            "splitCount 1 color 0 key 3- Init START",
            ("0x55", 3, 8, False),
        ),
    ],
    ids=["2.18", "2.21", "2.30", "split"],
)
def test_init_lines_of_all_versions(message: str, comm: tuple[object, ...]) -> None:
    ((found,),) = (process.comms for process in parse(info(message)).processes)
    assert (found.comm, found.rank, found.num_ranks, found.complete) == comm


@pytest.mark.parametrize(
    ("message", "transport"),
    [
        ("Channel 00/0 : 0[60] -> 1[70] via P2P/IPC", (0, 1, "P2P/IPC")),
        ("Channel 01/1 : 3[3] -> 0[0] via P2P/CUMEM/read", (3, 0, "P2P/CUMEM/read")),
        ("Channel 02 : 0[0] -> 1[1] via SHM/direct/direct", (0, 1, "SHM/direct/direct")),
        ("Channel 02 : 0[0] -> 1[1] via SHM/direct", (0, 1, "SHM/direct")),
        ("Channel 00/0 : 1[0] -> 0[0] [receive] via NET/IB/0", (1, 0, "NET/IB/0")),
    ],
)
def test_transport_lines(message: str, transport: tuple[object, ...]) -> None:
    (process,) = parse(info(message) * 2).processes
    (found,) = process.comms[0].transports
    assert (found.source, found.target, found.via) == transport
    assert found.num_channels == 1


def test_timestamps_and_launcher_prefixes_do_not_matter() -> None:
    line = info("NCCL_NTHREADS set by environment to 512.")
    for before in ("[2026-11-30 15:08:17] ", "(RayWorkerWrapper pid=7) ", "worker-0  | "):
        (process,) = parse(before + line).processes
        assert (process.host, process.pid) == ("host-1", 7)
        assert process.environment == {"NCCL_NTHREADS": "512"}


def test_a_bare_version_line_counts_for_processes_without_one() -> None:
    log = parse("NCCL version 2.27.5+cuda12.9\n" + info("NCCL_PROTO set by environment to LL"))
    assert log.processes[0].version == "2.27.5+cuda12.9"


def test_warnings_are_counted_with_their_first_place() -> None:
    line = "host-1:7:9 [0] enqueue.cc:2021 NCCL WARN Error : no algorithm/protocol available\n"
    (process,) = parse(info("cudaDriverVersion 13000") + line * 4).processes
    (warning,) = process.warnings
    assert (warning.count, warning.evidence.line) == (4, 2)
    assert "no algorithm" in warning.text


def test_a_second_communicator_takes_the_choices_after_it() -> None:
    init = "ncclCommInitRank comm {} rank 0 nranks {} cudaDev 0 nvmlDev 0 busId 6 commId {} - Init "
    choice = "AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"
    text = info(init.format("0x1", 8, "0xa") + "START") + info(
        init.format("0x1", 8, "0xa") + "COMPLETE"
    )
    text += info(choice)
    text += info(init.format("0x2", 2, "0xb") + "START") + info(
        init.format("0x2", 2, "0xb") + "COMPLETE"
    )
    text += info(choice)
    (process,) = parse(text).processes
    assert [comm.num_ranks for comm in process.comms] == [8, 2]
    assert [(c.comm, c.ambiguous) for c in process.choices] == [(0, False), (1, True)]


def test_a_large_log_is_only_counted() -> None:
    line = info("AllReduce: 14336 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}")
    (process,) = parse(line * 60_000).processes
    assert [choice.count for choice in process.choices] == [60_000]


def test_distinct_lines_beyond_the_limit_are_folded_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autotune.nccl_log.MAX_DISTINCT", 100)
    choice = info("AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}")
    (process,) = parse("".join(f"[{second:06d}] {choice}" for second in range(5000))).processes
    assert [(c.count, c.evidence.line) for c in process.choices] == [(5000, 1)]
