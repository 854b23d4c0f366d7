"""The documents' commands, run again: verdicts and figures that they show still hold."""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from study_files import sim_study, write_study

from autotune.cli.main import main
from bench.docs_commands import Block, blocks, differences, near, renewed, run

ROOT = Path(__file__).parents[2]
WALL = (ROOT / "docs" / "29ms-wall.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
RESULTS = ROOT / "studies" / "results" / "published"
_ROW = re.compile(r"^\| `(.*?)` \| .* \| (.*) \|$", re.MULTILINE)
#: they measure, or need a package that is not installed; the study's are run on the simulator below
_NOT_HERE = ("autotune probe", "autotune model import", "engine ")
_OF_A_STUDY = ("autotune study", "autotune dashboard", "autotune compare")


def rows() -> Iterator[tuple[str, list[str]]]:
    """(example, keys of --json) of docs/commands.md."""
    for command, keys in _ROW.findall(COMMANDS):
        listed = re.match(r"`([a-z0-9_, ]+)`$", keys)
        yield command, listed[1].split(", ") if listed else []


def json_of(words: list[str]) -> dict[str, object]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--json"])
    return dict(json.loads(out.getvalue()))


@pytest.mark.parametrize("block", blocks(WALL), ids=lambda b: " ".join(b.command.split()[:4])[:60])
def test_a_shown_output_is_what_the_command_prints(block: Block) -> None:
    _, lines = run(block.command)
    found = differences(block, lines)
    # pytest would shorten a comparison
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("command", "keys"),
    [r for r in rows() if r[1] and not r[0].startswith((*_NOT_HERE, *_OF_A_STUDY))],
    ids=lambda value: " ".join(value.split()[:4]) if isinstance(value, str) else "",
)
def test_documented_keys_are_the_keys(
    command: str, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert set(json_of(shlex.split(command)[1:])) == set(keys)


def test_documented_keys_of_study_commands_are_the_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATABASE", raising=False)
    path = write_study(tmp_path, sim_study(name="quickstart", budget={"measured_trials": 1}))
    documented = {" ".join(c.split()[1:3]): (c, k) for c, k in rows() if k}
    started = json_of(["study", "start", str(path)])
    assert set(started) == set(documented["study start"][1])
    level = re.search(r"Each of `levels`: `(.*?)`\.", COMMANDS, re.DOTALL)
    assert level is not None
    assert set(started["levels"][0]) == set(re.findall(r"\w+", level[1]))  # type: ignore[index]
    for name in ("status", "list", "best", "stop"):
        words = ["study", name, *([] if name == "list" else ["quickstart"])]
        assert set(json_of(words)) == set(documented[f"study {name}"][1]), name
    shown = set(json_of(["study", "report", "quickstart"]))
    assert shown == set(documented["study report"][1])
    compared = json_of(["compare", "baseline", "best", "--study", "quickstart", "--max-pairs", "6"])
    assert set(compared) == set(documented["compare baseline"][1])
    listed = json_of(["dashboard", "quickstart", "--no-serve"])
    assert set(listed) == set(documented["dashboard quickstart"][1])


def test_every_command_of_the_program_is_documented() -> None:
    from autotune.cli.main import COMMANDS as KNOWN

    documented = {command.split()[1] for command, _ in rows() if command.startswith("autotune")}
    assert documented == set(KNOWN)


def test_the_measured_table_is_the_recording() -> None:
    steps = [json.loads(line) for line in (RESULTS / "step-h200x2.jsonl").open(encoding="utf-8")]
    own = {r["tokens"]: r for r in steps if r["env"] == {"NCCL_P2P_DISABLE": "1"}}
    six = {r["tokens"]: r for r in steps if "NCCL_BUFFSIZE" in r["env"]}
    assert len(own) == len(six) == 8
    for tokens, row in own.items():
        ours, theirs = row["graph_us"], six[tokens]["graph_us"]
        line = (
            f"| {tokens} | {row['allreduce_bytes']:,} | {ours / 1e3:.2f} | {theirs / 1e3:.2f} | "
            f"{100 * (theirs / ours - 1):+.1f} % |"
        )
        assert line in WALL


def test_the_stand_alone_ratios_are_the_recording() -> None:
    lines = (RESULTS / "allreduce-h200x2.jsonl").read_text(encoding="utf-8").splitlines()
    times: dict[str, dict[int, float]] = {}
    for row in map(json.loads, lines):
        key = ",".join(f"{k[5:]}={v}" for k, v in sorted(row["env"].items()))
        times.setdefault(key, {})[row["size_bytes"]] = row["graph_us"]
    own = times["P2P_DISABLE=1"]
    low = times["ALGO=Ring,MAX_NCHANNELS=16,MIN_NCHANNELS=16,P2P_DISABLE=1,PROTO=LL"]
    high = times["ALGO=Ring,MAX_NCHANNELS=16,MIN_NCHANNELS=16,P2P_DISABLE=1,PROTO=Simple"]
    ratios = [f"{low[kib << 10] / own[kib << 10]:.2f}" for kib in (64, 128, 256)]
    assert "takes {} × the time at\n64 KiB, {} at 128 KiB and {} at 256 KiB".format(*ratios) in WALL
    ratios = [f"{high[kib << 10] / own[kib << 10]:.2f}" for kib in (512, 1024)]
    assert "measured {} and {} at 512 KiB and 1 MiB".format(*ratios) in WALL


def test_no_setting_explains_the_seventeen_milliseconds() -> None:
    values = json_of(
        ["explain", str(ROOT / "studies/launch/kimi-k2.5-29ms.yaml"), "--machine",
         "8x-rtx-pro-6000-switches"]
    )  # fmt: skip
    (found,) = values["explanations"]  # type: ignore[misc]
    assert found["nccl"]["saved_ms"]["high"] < 3.0
    assert max(found["levers"], key=lambda lever: lever["gain"]["ratio"]["median"])
    names = [lever["name"] for lever in found["levers"]]
    assert "capture verify in a CUDA graph" in names
    # 70 GiB a GPU on 8 ranks: 4 do not hold the model
    assert "other number of ranks" not in names + [
        lever["name"] for lever in found["levers_not_helping"]
    ]


@pytest.mark.parametrize(
    ("verify_ms", "pays"), [pytest.param("29", False, id="29"), pytest.param("19", True, id="19")]
)
def test_the_verdict_on_both_verifies(verify_ms: str, pays: bool) -> None:
    values = json_of(
        ["model", "break-even", "--target", "kimi-k2.5", "--machine", "8x-rtx-pro-6000-switches",
         "--baseline-tokens-per-s", "82.5", "--verify-ms", verify_ms, "--accept-length", "1.89"]
    )  # fmt: skip
    chains = values["verify"][0]["chains"]  # type: ignore[index]
    assert (max(row["p_pays"] for row in chains) > 0.5) is pays


@pytest.mark.parametrize(
    ("shown", "real", "same"),
    [
        pytest.param("29.0", "31.0", True, id="seven-percent"),
        pytest.param("29.0", "45.0", False, id="half-as-much-again"),
        pytest.param("2.60", "1.77", False, id="another-break-even"),
        pytest.param("0", "1", True, id="one-unit"),
        pytest.param("14,336", "14336", True, id="thousands"),
    ],
)
def test_figures_may_move_a_little(shown: str, real: str, same: bool) -> None:
    assert near(shown, real) is same


BLOCK = Block("autotune x", ("A=1: INERT", "…", "  took 2.50 ms", "  of 10"))


@pytest.mark.parametrize(
    ("lines", "holds"),
    [
        pytest.param(["A=1: INERT", "b", "  took 2.60 ms of 10"], True, id="wrapped-elsewhere"),
        pytest.param(["A=1: EFFECTIVE", "b", "took 2.50 ms of 10"], False, id="other-verdict"),
        pytest.param(["A=1: INERT", "b", "took 9.50 ms of 10"], False, id="other-figure"),
        pytest.param(["took 2.50 ms of 10", "A=1: INERT"], False, id="other-order"),
    ],
)
def test_a_block_is_compared_by_words_and_figures(lines: list[str], holds: bool) -> None:
    assert (differences(BLOCK, lines) == []) is holds


def test_renewing_prefers_the_line_that_still_holds() -> None:
    block = Block("autotune x", ("…", "MIN=16: helps by 0.74", "…"))
    new = renewed(block, ["MIN=32: helps by 0.71", "MIN=16: helps by 0.75"])
    assert new == ["…", "MIN=16: helps by 0.75", "…"]


def test_renewing_takes_new_figures_and_refuses_new_words() -> None:
    new = renewed(BLOCK, ["A=1: INERT", "b", "  took 9.50 ms", "  of 10"])
    assert new == ["A=1: INERT", "…", "  took 9.50 ms", "  of 10"]
    with pytest.raises(ValueError, match="rewrite by hand: A=1: INERT"):
        renewed(BLOCK, ["A=1: EFFECTIVE", "b", "  took 9.50 ms", "  of 10"])
