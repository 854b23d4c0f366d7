"""Mistakes in a study: each is one line that names value, place and way out, and leaves nothing."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from study_files import CPU_MACHINE, ROOT, sim_study, write_study

from autotune.cli.main import main
from autotune.store.store import Store

TINY = ROOT / "studies" / "models" / "tiny-moe"
NCCL = {"nccl.min_channels": 16, "nccl.max_channels": 4}
TREE = {
    "speculation.method": ["off", "eagle3"],
    "speculation.steps": 2,
    "speculation.topk": 2,
    "speculation.draft_tokens": [64, 100],
}


def cpu_study(**changes: Any) -> dict[str, Any]:
    """A study on CPU ranks; ``space`` is added to the least one."""
    space = {"speculation.method": ["off"], "parallel.tp": 2, "collectives.backend": "gloo"}
    values = sim_study(machine=str(CPU_MACHINE), target={"path": str(TINY)}, draft=None)
    values["draft"] = {"path": f"{TINY}-eagle3"}
    values["workload"] = {**values["workload"], "input_len": 64, **changes.pop("workload", {})}
    values["space"] = {**space, **changes.pop("space", {})}
    return values | changes


def start(folder: Path, capsys: pytest.CaptureFixture[str], values: dict[str, Any], *more: str):
    """Exit code and stderr of ``study start`` in ``folder``."""
    file = write_study(folder, values)
    with pytest.raises(SystemExit) as ended:
        main(["study", "start", str(file), "-d", str(folder / "a.db"), *more])
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param(
            {"space": NCCL},
            ["nccl.min_channels 16 is above nccl.max_channels 4", "widen a list"],
            id="min-channels-above-max-even-where-nccl-is-inert",
        ),
        pytest.param(
            {"space": {**TREE, "speculation.topk": 1}},
            ["speculation.draft_tokens", "[64, 100]", "steps + 1 = 3", "leave draft_tokens out"],
            id="chain-of-a-length-no-steps-have",
        ),
        pytest.param(
            {"space": TREE},
            ["speculation.method eagle3", "draft_tokens 64", "between 2 and 7", "widen a list"],
            id="tree-that-never-fits-beside-plain-decoding",
        ),
        pytest.param(
            {"workload": {"prompts": "builtin:poems"}},
            ["'builtin:poems'", "builtin:code, builtin:text"],
            id="unknown-prompts-on-a-backend-that-reads-none",
        ),
        pytest.param(
            {"workload": {"prompts": "mine.jsonl"}},
            ["mine.jsonl", "not a file", "builtin:code"],
            id="missing-prompt-file",
        ),
        pytest.param(
            {"target": {"shape": "qwen3-30b-a3b", "weights": "random", "layers": 4000}},
            ["target: layers 4000", "the 48 that qwen3-30b-a3b has", "leave it out"],
            id="more-layers-than-the-model-has",
        ),
        pytest.param({"seed": -5}, ["seed: -5", ">= 0"], id="negative-seed"),
        pytest.param({"seed": 2**40}, [f"seed: {2**40}", "<= 2147483647"], id="huge-seed"),
        pytest.param(
            {"backend": {"kind": "tgi"}},
            ["backend.kind", "'tgi'", "engine, replay, sim"],
            id="unknown-backend",
        ),
        pytest.param(
            {"backend": {"kind": "sim", "args": {"clok": 1}}},
            ["backend.args.clok", "unknown argument", "clock"],
            id="unknown-argument-of-a-backend",
        ),
        pytest.param(
            {"backend": {"kind": "engine", "args": {"device": "cpuu"}}},
            ["backend.args.device", "'cpuu'", "'cpu'"],
            id="unknown-device",
        ),
    ],
)
def test_a_mistake_is_one_line_and_stores_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    parts: list[str],
) -> None:
    code, err = start(tmp_path, capsys, cpu_study(**changes))
    lines = err.strip().splitlines()
    assert (code, len(lines)) == (2, 1), err
    assert all(part in lines[0] for part in parts), err
    assert not (tmp_path / "a.db").exists()
    assert not (tmp_path / "autotune-logs").exists()


def test_a_folder_as_database_is_called_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = start(tmp_path, capsys, cpu_study(), "-d", str(tmp_path))
    assert code == 2
    assert f"{tmp_path} is a folder, not a file" in err


def test_a_corrected_file_keeps_its_name_until_something_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = {"kind": "sim", "args": {"failures": {"start_crash": 1.0}, "slow_host_share": 0.0}}
    code, err = start(tmp_path, capsys, cpu_study(backend=failing))
    assert code == 1
    assert "simulated crash" in err

    code, err = start(tmp_path, capsys, cpu_study(space={"parallel.tp": 1}))
    assert code == 0, err
    store = Store.existing(str(tmp_path / "a.db"))
    names = [view.name for view in store.studies()]
    store.close()
    assert names == ["sim~1", "sim"]

    code, err = start(tmp_path, capsys, cpu_study(seed=7))
    assert code == 2
    assert "exists already" in err
    assert "--name" in err


def test_a_machine_file_of_another_host_is_refused_by_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(CPU_MACHINE.read_text() + "\nhost_fingerprint: 0123456789ab\n")
    engine = {"kind": "engine", "args": {"device": "cpu"}}
    code, err = start(tmp_path, capsys, cpu_study(machine=str(other), backend=engine))
    assert code == 2
    assert "probed on host 0123456789ab" in err
    assert "autotune probe" in err


@pytest.mark.parametrize(
    ("text", "part"),
    [
        pytest.param("a: &a [*a]\n", "alias", id="anchor-that-holds-itself"),
        pytest.param("", "this file is empty", id="empty"),
        pytest.param("- a\n", "this file is a list", id="list"),
        pytest.param("name: a\x00b\n", "not valid YAML", id="control-character"),
        pytest.param("name: x\n\tb: 1\n", ":2: not valid YAML", id="tab"),
        pytest.param("[1, 2]: 3\n", "not valid YAML", id="list-as-key"),
    ],
)
def test_a_file_that_is_no_study_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, part: str
) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["study", "start", str(file)])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(err.splitlines()) == 1
    assert str(file) in err
    assert part in err


def test_a_range_of_billions_is_refused_without_being_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = {**TREE, "speculation.steps": {"int": [1, 10**12]}}
    code, err = start(tmp_path, capsys, cpu_study(space=space))
    assert code == 2
    assert f"range [1, {10**12}] has {10**12} values" in err


def test_concurrency_beyond_any_host_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = start(tmp_path, capsys, cpu_study(workload={"concurrency": [1, 10**6]}))
    assert code == 2
    assert "workload.concurrency[1]: 1000000" in err


@pytest.mark.parametrize("place", ["folder", "missing/best.yaml"])
def test_a_best_config_that_cant_be_written_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "folder").mkdir()
    code, err = start(tmp_path, capsys, cpu_study(), "--out", str(tmp_path / place))
    assert code == 2
    assert f"--out {tmp_path / place}" in err
    assert not (tmp_path / "a.db").exists()


def test_an_error_of_a_json_command_is_an_object_on_stdout_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["study", "status", "x", "--json", "-d", str(tmp_path / "none.db")])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert json.loads(out)["exit_code"] == 2
    assert json.loads(out)["error"] in err


def test_a_full_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, err = start(tmp_path, capsys, cpu_study())
    assert code == 0, err
    before = (tmp_path / "sim.best.yaml").read_text()

    def full(path: Path, *_args: object, **_options: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SystemExit) as ended:
        main(["study", "best", "sim", "-d", str(tmp_path / "a.db")])
    err = capsys.readouterr().err
    assert ended.value.code == 1
    assert len(err.splitlines()) == 1
    assert "No space left on device" in err
    # the file of before is whole
    monkeypatch.undo()
    assert (tmp_path / "sim.best.yaml").read_text() == before
    assert [path.name for path in tmp_path.glob(".*best*")] == []


def test_optuna_tables_of_another_optuna_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, err = start(tmp_path, capsys, cpu_study())
    assert code == 0, err
    connection = sqlite3.connect(tmp_path / "a.db")
    connection.execute("update alembic_version set version_num = 'v99.0.0.a'")
    connection.commit()
    connection.close()
    with pytest.raises(SystemExit) as ended:
        main(["study", "resume", "sim", "-d", str(tmp_path / "a.db")])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert "its Optuna tables are of another Optuna" in err
    assert str(tmp_path / "a.db") in err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", [["study", "list"], ["study", "list", "--json"]], ids=" ".join)
def test_output_that_nobody_can_take_ends_without_a_traceback(
    tmp_path: Path, words: list[str]
) -> None:
    Store.create(f"sqlite:///{tmp_path}/a.db").close()
    command = [sys.executable, "-m", "autotune.cli.main", *words, "-d", str(tmp_path / "a.db")]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=200)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == ["autotune: No space left on device"]


def test_a_terminal_that_knows_ascii_only_gets_the_table_all_the_same(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune.cli.main", "study", "list"]
    Store.create(f"sqlite:///{tmp_path}/a.db").close()
    ended = subprocess.run(
        [*command, "-d", str(tmp_path / "a.db")],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ended.returncode == 0, ended.stderr
    assert "trials" in ended.stdout


def test_reading_leaves_an_empty_file_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.txt"
    file.touch()
    with pytest.raises(SystemExit) as ended:
        main(["study", "list", "-d", str(file)])
    assert ended.value.code == 2
    assert "holds no studies" in capsys.readouterr().err
    assert file.read_bytes() == b""
