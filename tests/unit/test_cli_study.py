"""The command line: exit codes, one line per mistake, JSON alone on stdout."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from study_files import MACHINE, sim_study, write_study

from autotune.cli.main import main


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study."""
    folder = tmp_path_factory.mktemp("cli")
    write_study(folder, sim_study())
    words = ["study", "start", "study.yaml", "--json", "-d", "a.db"]
    command = [sys.executable, "-m", "autotune.cli.main", *words]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    (folder / "start.json").write_text(ran.stdout)
    (folder / "start.err").write_text(ran.stderr)
    return folder


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOTUNE_DATABASE", raising=False)


def test_json_is_one_object_on_stdout_and_progress_is_on_stderr(done: Path) -> None:
    values = json.loads((done / "start.json").read_text())
    assert values["num_search_trials"] == 3
    level = values["levels"][0]
    assert level["concurrency"] == 1
    assert level["baseline"]["median"] > 0
    progress = (done / "start.err").read_text()
    for part in ("noise floor at c=1", "trial 2 (1 of 3)", "predicted", "best so far"):
        assert part in progress


def test_the_best_config_file_holds_the_engine_block_and_the_evidence(done: Path) -> None:
    best = yaml.safe_load((done / "sim.best.yaml").read_text())
    values = json.loads((done / "start.json").read_text())
    assert best["engine"]["tp"] == 8
    assert best["evidence"]["levels"][0]["trial"] == values["levels"][0]["trial"]
    assert best["evidence"]["noise_floor"] == values["levels"][0]["noise_floor"]


def test_reading_commands_agree_with_the_study(done: Path, capsys) -> None:
    database = str(done / "a.db")
    code, out, err = call(capsys, "study", "list", "--json", "-d", database)
    assert (code, err) == (0, "")
    assert json.loads(out)["studies"][0]["state"] == "finished"
    code, out, _ = call(capsys, "study", "status", "sim", "--json", "-d", database)
    assert json.loads(out)["num_search_trials"] == 3
    code, out, _ = call(capsys, "study", "report", "sim", "--json", "-d", database)
    assert json.loads(out)["levels"] == json.loads((done / "start.json").read_text())["levels"]
    code, out, _ = call(capsys, "study", "report", "sim", "-d", database)
    assert code == 0
    for part in ("baseline", "best", "speed-up", "95 % CI", "predicted", "noise floor"):
        assert part in out
    code, out, _ = call(capsys, "study", "best", "sim", "-d", database, "-o", "b.yaml")
    assert code == 0
    assert Path("b.yaml").exists()
    code, out, _ = call(capsys, "study", "stop", "sim", "-d", database)
    assert "nobody works on study sim" in out


def test_a_table_is_complete_when_stdout_is_no_terminal(done: Path, capsys) -> None:
    _, out, _ = call(capsys, "study", "report", "sim", "-d", str(done / "a.db"))
    assert "…" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["study", "start", "no.yaml"], "no.yaml: no such file", id="no-file"),
        pytest.param(["study", "list", "-d", "no.db"], "no such file; start a study", id="no-db"),
        pytest.param(["study", "strat"], "No such command", id="command"),
        pytest.param(["study", "start"], "Missing argument", id="argument"),
        pytest.param(["predict"], "Missing argument", id="predict-nothing"),
        pytest.param(["predict", "a.yaml", "b.yaml"], "takes one study file", id="two-files"),
        pytest.param(
            ["predict", "--target", "mixtral-8x7b", "speculation.stps=2"],
            "speculation.stps: unknown knob; did you mean speculation.steps?",
            id="knob",
        ),
        pytest.param(
            ["predict", "speculation.steps=2"], "needs a study file, or --target", id="no-target"
        ),
        pytest.param(
            ["predict", "--target", "mixtral", "speculation.steps=2"],
            "shape 'mixtral' is unknown; known: ",
            id="shape",
        ),
    ],
)
def test_a_mistake_of_the_user_exits_with_2(capsys, words: list[str], message: str) -> None:
    code, out, err = call(capsys, *words)
    assert code == 2
    assert out == ""
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"wrkload": 1}, "wrkload: unknown key; did you mean workload?", id="key"),
        pytest.param({"target": {"path": "absent"}}, "target: no folder", id="model-folder"),
        pytest.param(
            {
                "space": {
                    "nccl.min_channels": [8],
                    "nccl.max_channels": [4],
                    "parallel.tp": 8,
                }
            },
            "nccl.min_channels 8 is above nccl.max_channels 4",
            id="channels",
        ),
    ],
)
def test_a_bad_study_leaves_no_database_behind(
    capsys, tmp_path: Path, changes: dict, message: str
) -> None:
    path = write_study(tmp_path, sim_study(**changes))
    code, out, err = call(capsys, "study", "start", str(path), "-d", "a.db")
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert not Path("a.db").exists()


def test_a_name_with_another_file_is_refused_and_the_way_out_named(
    done: Path, capsys, tmp_path: Path
) -> None:
    path = write_study(tmp_path, sim_study(seed=2))
    code, _, err = call(capsys, "study", "start", str(path), "-d", str(done / "a.db"))
    assert code == 2
    assert "exists already in the database with another study file" in err
    assert "--name" in err


def test_a_newer_database_and_an_unknown_study_exit_with_2(done: Path, capsys, tmp_path) -> None:
    code, _, err = call(capsys, "study", "report", "x", "-d", str(done / "a.db"))
    assert code == 2
    assert "no study 'x'" in err
    copy = tmp_path / "new.db"
    with sqlite3.connect(done / "a.db") as source, sqlite3.connect(copy) as target:
        source.backup(target)
        target.execute("UPDATE autotune_alembic_version SET version_num = '9999'")
    code, _, err = call(capsys, "study", "list", "-d", str(copy))
    assert code == 2
    assert "was written by a newer autotune" in err


def test_predict_ranks_a_study_and_details_knobs(capsys, tmp_path: Path) -> None:
    path = write_study(tmp_path, sim_study())
    code, out, _ = call(capsys, "predict", str(path), "--top", "3", "--json")
    assert code == 0
    best = json.loads(out)["levels"][0]["best"]
    speeds = [entry["tokens_per_s"]["median"] for entry in best]
    assert len(speeds) == 3
    assert speeds == sorted(speeds, reverse=True)
    knobs = ("speculation.steps=2", "parallel.tp=8", "nccl.proto=LL")
    options = ("--target", "qwen3-30b-a3b", "--machine", str(MACHINE))
    code, out, _ = call(capsys, "predict", *knobs, *options, "--json")
    assert code == 0
    level = json.loads(out)["levels"][0]
    assert "verify.allreduce" in level["terms_ms"]
    code, out, _ = call(capsys, "predict", *knobs, *options)
    assert "speed of light, ms" in out
    assert "tok/s (90 %" in out


@pytest.mark.parametrize(
    ("target", "given", "ranks", "notes"),
    [
        pytest.param("kimi-k2.5", [], 8, ["8 of this machine's 8 GPUs"], id="all"),
        pytest.param("kimi-k2.5", ["parallel.tp=4"], 4, [], id="as-given"),
    ],
)
def test_predict_without_a_study_takes_the_machines_gpus(
    capsys: pytest.CaptureFixture[str], target: str, given: list[str], ranks: int, notes: list[str]
) -> None:
    words = ["speculation.steps=2", "cuda_graph.verify=true", *given]
    options = ("--target", target, "--machine", "8x-rtx-pro-6000-switches", "--json")
    code, out, _ = call(capsys, "predict", *words, *options)
    assert code == 0
    values = json.loads(out)
    assert values["knobs"]["parallel.tp"] == ranks
    said = [note for note in values["notes"] if "parallel.tp" in note]
    assert len(said) == len(notes)
    assert all(part in note for part, note in zip(notes, said, strict=True))


def test_listing_studies_imports_neither_torch_nor_the_engine(done: Path) -> None:
    script = (
        "import sys; from autotune.cli.main import main\n"
        "try: main(['study', 'list', '-d', sys.argv[1]])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print([m for m in ('torch', 'engine', 'optuna', 'plotly') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script, str(done / "a.db")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip().splitlines()[-1] == "[]"


def test_the_database_is_taken_from_the_environment(done: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("AUTOTUNE_DATABASE", str(done / "a.db"))
    code, out, _ = call(capsys, "study", "list", "--json")
    assert code == 0
    assert json.loads(out)["studies"][0]["study"] == "sim"
