"""Every choice in NCCL's logs equals the selector's; what differs is reported, not hidden."""

import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli.model_selector import app
from autotune.errors import UserError
from autotune.nccl_log import parse_nccl_stream
from autotune.selector_check import check_log, check_selector

DATA = Path(__file__).parents[1] / "data" / "nccl_logs"
RANK0 = sorted(DATA.glob("*.rank0.log"))
CASES = DATA / "nccl-cases.jsonl.gz"


@pytest.mark.parametrize("path", RANK0, ids=lambda path: path.stem)
def test_every_line_of_every_log_is_chosen_alike(path: Path) -> None:
    report = check_selector([path])
    assert (report.lines, report.equal, report.differences) == (18, 18, ())
    (comm,) = report.comms
    assert (comm.table_equal, comm.table_entries) == (6, 6)
    assert comm.search_equal is True
    assert comm.channels_logged == comm.channels_selector
    assert comm.compute_capability == (90,)
    assert report.not_compared == {}


def test_all_logs_at_once_with_both_ranks() -> None:
    report = check_selector([DATA / "README.md", *DATA.glob("*.log")])
    assert (report.lines, report.equal) == (126, 126)
    assert len(report.comms) == len(RANK0)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("524288 Bytes -> Algo RING proto SIMPLE", "524288 Bytes -> Algo RING proto LL", "choice"),
        ("65536 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
         "65536 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..2}", "choice"),
        ("8.6/  20.0", "8.6/  21.0", "table Ring/LL"),
        ("4 coll channels", "3 coll channels", "channels"),
        ("nChannels 2, bw 20.000000", "nChannels 2, bw 24.000000", "table Ring/LL"),
    ],
)  # fmt: skip
def test_what_differs_is_reported(old: str, new: str, kind: str, tmp_path: Path) -> None:
    text = (DATA / "shm_default.rank0.log").read_text()
    assert old in text
    path = tmp_path / "changed.log"
    path.write_text(text.replace(old, new))
    report = check_selector([path])
    kinds = {difference.kind for difference in report.differences}
    assert kind in kinds
    if kind == "choice":
        assert (report.lines, report.equal) == (18, 17)
        (difference,) = report.differences
        assert re.fullmatch(r".*changed\.log:\d+", difference.evidence)


def test_a_graph_that_the_search_does_not_find_is_reported(tmp_path: Path) -> None:
    text = (DATA / "shm_default.rank0.log").read_text()
    path = tmp_path / "changed.log"
    path.write_text(text.replace("+ PCI[48.0] - GPU/0-70", "+ PCI[24.0] - GPU/0-70"))
    (comm,) = check_selector([path]).comms
    assert comm.search_equal is False
    assert [difference.kind for difference in comm.differences] == ["graph search"]
    assert comm.equal == comm.lines == 18


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("NCCL version 2.28.9", "NCCL version 2.26.2", ("2.26.2", "known:", "2.28.9")),
        ("NCCL version 2.28.9", "NCCL ver", ("does not show the NCCL version", "--nccl-version")),
        (" Bytes -> ", " bytes -> ", ("no AllReduce choice", "NCCL_DEBUG_SUBSYS")),
        ("Pattern 4", "Patter", ("not logged", "GRAPH")),
        ("NCCL_PROTO set by environment to LL", "NCCL_PROTO set by environment to L9", ("'L9'",)),
    ],
)
def test_logs_that_do_not_suffice_are_refused_in_one_line(
    old: str, new: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "changed.log"
    path.write_text((DATA / "shm_seed.rank0.log").read_text().replace(old, new))
    with pytest.raises(UserError) as caught:
        check_selector([path])
    assert all(word in str(caught.value) for word in (*words, str(path)))
    assert "\n" not in str(caught.value)


def test_other_lines_are_counted_not_compared() -> None:
    text = (DATA / "shm_default.rank0.log").read_text()
    prefix = "vm:661:661 [0] NCCL INFO "
    text += prefix + "Broadcast: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}\n"
    text += prefix + "AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={2..3}\n"
    report = check_log(parse_nccl_stream(io.BytesIO(text.encode())))
    assert report.not_compared == {"other collective": 1, "part of a grouped call": 1}
    assert report.equal == report.lines == 18


def test_the_command_prints_one_json_object() -> None:
    result = CliRunner().invoke(app, ["--log", str(RANK0[0]), "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["lines"], found["equal"], found["differences"]) == (18, 18, [])


def recorded_cases() -> list[dict[str, Any]]:
    """Environments recorded by ``bench/record_nccl_cases.py``; none where the file is absent."""
    if not CASES.exists():
        return []
    with gzip.open(CASES, "rt") as file:
        return [json.loads(line) for line in file]


def case_id(case: dict[str, Any]) -> str:
    env = {k.removeprefix("NCCL_"): v for k, v in case["env"].items() if k != "NCCL_NVLS_ENABLE"}
    return f"{case['version']} " + " ".join(f"{name}={value}" for name, value in env.items())


@pytest.mark.parametrize("case", recorded_cases(), ids=case_id)
def test_recorded_cases_are_chosen_alike(case: dict[str, Any]) -> None:
    lines = list(case["log_rank0"])
    prefix = re.match(r"\S+ \[\d+\] NCCL INFO ", lines[0])
    assert prefix is not None
    lines += [
        f"{prefix[0]}AllReduce: {size} Bytes -> Algo {algo} proto {proto} "
        f"channel{{Lo..Hi}}={{{low}..{high}}}"
        for size, algo, proto, low, high in case["choices"]
    ]
    log = parse_nccl_stream(io.BytesIO("\n".join(lines).encode()), "case")
    if case["error"] is not None:
        pytest.skip(f"NCCL did not run: {case['error'][:80]}")
    report = check_log(log)
    assert report.lines == len(case["choices"])
    assert report.differences == ()
