"""Logs of every release, and wrapped in what launchers, containers and people put around them."""

import bz2
import gzip
import io
import json
import lzma
from pathlib import Path

import pytest

from autotune.effect.judge import judge_log
from autotune.errors import UserError
from autotune.nccl_log import parse_nccl_logs, parse_nccl_stream
from autotune.nccl_log_types import NcclLog
from tests.unit.nccl_logs import WRAPPERS, interleaved, rank_lines, recorded

STORY = {"NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": "16", "NCCL_BUFFSIZE": "16777216"}


def parse(text: str) -> NcclLog:
    return parse_nccl_stream(io.BytesIO(text.encode()), "log")


def facts(log: NcclLog) -> list[object]:
    """What must not depend on the wrapping."""
    return [
        (
            process.host,
            process.environment,
            [(c.rank, c.num_ranks, c.coll_channels, c.transport) for c in process.comms],
            [[(row.function, row.protocols) for row in c.enabled] for c in process.comms],
            [(c.size_bytes, c.algo, c.proto, c.channel_high, c.count) for c in process.choices],
        )
        for process in sorted(log.processes, key=lambda process: process.pid or 0)
    ]  # fmt: skip


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["shm_seed", "shm_ring_LL128"])
def test_what_is_around_a_line_changes_nothing(wrapper: str, name: str) -> None:
    files = [recorded(name, rank) for rank in (0, 1)]
    plain = parse(interleaved(files, WRAPPERS["plain"]))
    wrapped = parse(interleaved(files, WRAPPERS[wrapper]))
    assert facts(wrapped) == facts(plain)
    assert [process.host for process in wrapped.processes] == ["vm", "vm"]
    # rank 0 prints the matrix, on lines without a prefix
    assert sorted(len(c.enabled) for p in plain.processes for c in p.comms) == [0, 5]


@pytest.mark.parametrize("version", [
    "2.18.1", "2.19.3", "2.20.5", "2.21.5", "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.26.2",
    "2.27.7", "2.28.9", "2.29.7", "2.30.7",
])  # fmt: skip
def test_every_release_tells_ranks_channels_transport_and_settings(version: str) -> None:
    files = [rank_lines(version, rank, env=STORY) for rank in range(4)]
    log = parse(interleaved(files, WRAPPERS["plain"], seed=3))
    assert log.versions == (version,)
    assert len(log.processes) == 4
    for process in log.processes:
        (comm,) = process.comms
        assert (comm.num_ranks, comm.coll_channels, comm.transport) == (4, 2, "SHM")
        assert comm.complete
        assert process.environment == STORY
    judgement = judge_log(log, STORY)
    verdicts = {knob.name: knob.verdict for knob in judgement.knobs}
    assert verdicts["NCCL_BUFFSIZE"] == verdicts["NCCL_MAX_NCHANNELS"] == "inert"
    assert verdicts["NCCL_PROTO"] == "unknown"
    assert all(len(knob.evidence) == 4 for knob in judgement.knobs)
    assert len(judgement.comms) == 1
    assert not any("wrote a log" in note for note in judgement.notes)


@pytest.mark.parametrize(
    "pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"]
)
def test_compressed_files_are_read_as_they_are(pack, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    text = "\n".join(recorded("shm_seed", 0)).encode()
    (tmp_path / "plain.log").write_bytes(text)
    (tmp_path / "packed.log").write_bytes(pack(text))
    plain, packed = (parse_nccl_logs([tmp_path / f"{n}.log"]) for n in ("plain", "packed"))
    assert facts(packed) == facts(plain)
    assert packed.num_lines == plain.num_lines


def test_a_cut_compressed_file_gives_what_was_readable_and_says_so(tmp_path: Path) -> None:
    packed = gzip.compress("\n".join(recorded("shm_seed", 0) * 50).encode())
    (tmp_path / "cut.log.gz").write_bytes(packed[: len(packed) // 2])
    log = parse_nccl_logs([tmp_path])
    assert log.processes
    (note,) = log.notes
    assert "cut.log.gz is damaged" in note
    assert note in judge_log(log).notes


def test_utf16_of_a_redirecting_shell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "out.log"
    path.write_bytes("\r\n".join(recorded("shm_seed", 0)).encode("utf-16"))
    (process,) = parse_nccl_logs([path]).processes
    assert process.environment["NCCL_PROTO"] == "LL"


def test_a_folder_of_nodes_is_read_whole_and_weights_are_not(tmp_path: Path) -> None:
    for node in ("a", "b"):
        (tmp_path / node).mkdir()
        lines = rank_lines("2.27.7", 0 if node == "a" else 1, ranks=2, host=node)
        (tmp_path / node / f"nccl.{node}.4000.log").write_text("\n".join(lines))
    (tmp_path / "model.safetensors").write_bytes(b"x:1:1 [0] NCCL INFO NCCL_PROTO set by")
    log = parse_nccl_logs([tmp_path])
    assert sorted(process.host or "" for process in log.processes) == ["a", "b"]
    assert not any("safetensors" in name for name in log.files)


def test_an_empty_folder_and_zstd_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no log in the folder"):
        parse_nccl_logs([tmp_path])
    (tmp_path / "x.log").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(UserError, match="zstd -dc"):
        parse_nccl_logs([tmp_path / "x.log"])


def test_lines_that_differ_by_their_time_only_are_one_choice() -> None:
    choice = "h:7:7 [0] NCCL INFO AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}"
    text = "".join(f"2026-11-30T15:08:{i:06d}Z {choice}\n" for i in range(2000))
    text += "".join(json.dumps({"log": f"{choice}\n", "time": str(i)}) + "\n" for i in range(1000))
    (found,) = parse(text).processes[0].choices
    assert (found.count, found.evidence.line) == (3000, 1)


@pytest.mark.parametrize(
    ("message", "read"),
    [
        ("NCCL_SOCKET_IFNAME set by environment to eth0", ("NCCL_SOCKET_IFNAME", "eth0")),
        ("NCCL_IB_HCA set to mlx5_0,mlx5_1", ("NCCL_IB_HCA", "mlx5_0,mlx5_1")),
        ("NCCL_OOB_NET_IFNAME set to eth1", ("NCCL_OOB_NET_IFNAME", "eth1")),
        ("NCCL_COLLNET_ENABLE set by environment to 1.", ("NCCL_COLLNET_ENABLE", "1")),
        ("NCCL_PROTO set by environment to ", ("NCCL_PROTO", "")),
        ("NCCL_PROTO set by environment to", ("NCCL_PROTO", "")),
        ("TUNER/Plugin: NCCL_TUNER_PLUGIN set to /x/t.so", ("NCCL_TUNER_PLUGIN", "/x/t.so")),
        ("Comm config netName reset to NCCL_NET=Socket", ("NCCL_NET", "Socket")),
        ("NCCL_THREAD_THRESHOLDS set by environment to 8 8 64 8 8 64",
         ("NCCL_THREAD_THRESHOLDS", "8 8 64 8 8 64")),
    ],
)  # fmt: skip
def test_every_form_of_a_read_variable(message: str, read: tuple[str, str]) -> None:
    (process,) = parse(f"h:7:7 [0] NCCL INFO {message}\n").processes
    assert list(process.environment.items()) == [read]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param("Using tuner plugin: 'mine'", id="2.19-to-2.21"),
        pytest.param("TUNER/Plugin: Using tuner plugin mine", id="2.22-to-2.27"),
        pytest.param("Successfully loaded external tuner plugin mine", id="2.28"),
    ],
)
def test_a_tuner_plugin_is_noticed_in_every_release(message: str) -> None:
    lines = rank_lines("2.22.3", 0)
    lines.insert(3, f"gpu-host:4000:4000 [0] NCCL INFO {message}")
    assert parse("\n".join(lines)).processes[0].comms[0].tuner == "mine"


def test_the_internal_tuner_is_none() -> None:
    lines = rank_lines("2.22.3", 0)
    lines.insert(3, "gpu-host:4000:4000 [0] NCCL INFO TUNER/Plugin: Using internal tuner plugin.")
    assert parse("\n".join(lines)).processes[0].comms[0].tuner is None


@pytest.mark.parametrize(
    "where",
    [
        "h:7:9 [0] enqueue.cc:2021 NCCL WARN no algorithm",
        "[2026-11-30 15:08:17] h:7:9 [0] enqueue.cc:2021 NCCL WARN no algorithm",
        "h:7:9 [0] enqueue.cc:2021 (getAlgo) NCCL WARN no algorithm",
    ],
    ids=["2.18", "2.26-with-time", "2.30-with-function"],
)
def test_warnings_of_every_release_alone_and_behind_another_message(where: str) -> None:
    (process,) = parse(f"{where}\n").processes
    assert (process.pid, process.warnings[0].text) == (7, "no algorithm")
    # glued to the line before
    first = "h:8:8 [1] NCCL INFO NCCL_PROTO set by environment to LL "
    both = parse(f"{first}{where}\n")
    assert both.processes[0].environment == {"NCCL_PROTO": "LL"}
    assert both.processes[1].warnings[0].text == "no algorithm"


def split(rank: int, pointer: str, parent: str, number: str, colour: int, end: str) -> str:
    return (
        f"gpu-host:{4000 + rank}:{4000 + rank} [{rank}] NCCL INFO ncclCommSplit comm {pointer} "
        f"rank {rank % 2} nranks 2 cudaDev {rank} nvmlDev {rank} busId {rank}1000 parent {parent}"
        f"{number} color {colour} key {rank}{' ' if end == 'COMPLETE' else ''}- Init {end}"
    )


@pytest.mark.parametrize("counted", [True, False], ids=["2.22", "before-2.22"])
def test_communicators_split_from_one_are_the_same_on_all_their_ranks(counted: bool) -> None:
    """World of 4, then pairs for tensor and for pipeline parallel: no id of their own."""
    lines = []
    for rank in range(4):
        world = f"0x55d{rank}"
        lines += rank_lines("2.27.7", rank, comms=[(world, "0x9f1")])
        for count, colour in ((1, rank // 2), (2, rank % 2)):
            number = f" splitCount {count}" if counted else ""
            for end in ("START", "COMPLETE"):
                lines.append(split(rank, f"0x77{rank}{count}", world, number, colour, end))
    log = parse("\n".join(lines))
    groups = [{comm.group for comm in process.comms} for process in log.processes]
    assert all(len(mine) == 3 for mine in groups)
    assert len(set.union(*groups)) == 5
    assert len(set.intersection(*groups)) == 1
    judgement = judge_log(log)
    assert sorted(comm.num_ranks or 0 for comm in judgement.comms) == [2, 2, 2, 2, 4]
    assert not any("wrote a log" in note for note in judgement.notes)
    assert any("5 communicators (4, 2, 2, 2, 2 ranks)" in note for note in judgement.notes)


def test_a_rank_without_a_log_is_missed_although_other_groups_have_its_number() -> None:
    """Rank 3 of the world wrote nothing; the pairs hold ranks 0 and 1 only."""
    lines = []
    for rank in range(3):
        lines += rank_lines("2.27.7", rank, comms=[(f"0x55d{rank}", "0x9f1")])
        lines += rank_lines("2.27.7", rank % 2, ranks=2, comms=[("0x66", "0xaa")])[1:]
    notes = judge_log(parse("\n".join(lines))).notes
    assert any("3 of 4 ranks wrote a log (missing: 3)" in note for note in notes)


def test_the_transport_of_a_communicator_is_that_of_all_its_ranks() -> None:
    lines = [
        line
        for rank in range(4)
        for line in rank_lines("2.27.7", rank, via="NET/IB/0" if rank % 2 else "P2P/CUMEM")
    ]
    (comm,) = judge_log(parse("\n".join(lines))).comms
    assert comm.transport == "mixed"


def test_containers_with_one_host_name_and_equal_ids_stay_apart(tmp_path: Path) -> None:
    for rank, env in ((0, {"NCCL_MAX_NCHANNELS": "16"}), (1, {})):
        lines = rank_lines("2.27.7", rank, 2, env, pid=45 - rank)
        (tmp_path / f"worker{rank}.log").write_text("\n".join(lines))
    log = parse_nccl_logs([tmp_path])
    assert [process.ranks for process in log.processes] == [(0,), (1,)]
    (knob,) = judge_log(log, {"NCCL_MAX_NCHANNELS": "16"}).knobs
    assert knob.verdict == "not effective"
    assert "1 of 2 workers never read it (rank 1" in knob.reason


def test_one_process_with_two_devices_in_one_file_stays_one() -> None:
    lines = [line for rank in (0, 1) for line in rank_lines("2.27.7", rank, 2, pid=45 - rank)]
    (process,) = parse("\n".join(lines)).processes
    assert process.ranks == (0, 1)
