"""``autotune model validate``: held-out rows, other kinds, and files that lack something."""

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from autotune.cli.main import main
from autotune.errors import UserError
from autotune.model_validation.files import read_data_file
from autotune.model_validation.scores import gpu_words, of_this_gpu
from autotune.model_validation.validate import validate
from model.machine import Machine, load_machine

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "studies/results/published"
Rows = list[dict[str, str]]


def machine(name: str) -> Machine:
    return load_machine(ROOT / f"studies/machines/{name}.yaml")


def split_csv(
    source: Path, folder: Path, chosen: Callable[[dict[str, str]], bool], keep: Sequence[str] = ()
) -> tuple[Path, Path]:
    """(rows where ``chosen``, the others) as two files; ``keep`` names the columns that stay."""
    with open(source, newline="") as file:
        rows = list(csv.DictReader(file))
    columns = list(keep) or list(rows[0])
    paths = (folder / "data.csv", folder / "train.csv")
    for path, part in zip(
        paths, ([r for r in rows if chosen(r)], [r for r in rows if not chosen(r)]), strict=True
    ):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(part)
    return paths


def split_jsonl(
    source: Path, folder: Path, chosen: Callable[[dict[str, object]], bool]
) -> tuple[Path, Path]:
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    paths = (folder / "data.jsonl", folder / "train.jsonl")
    for path, want in zip(paths, (True, False), strict=True):
        path.write_text("\n".join(json.dumps(r) for r in rows if chosen(r) is want) + "\n")
    return paths


def test_left_out_sizes_of_a_published_table_are_predicted(tmp_path: Path) -> None:
    data, train = split_csv(
        PUBLISHED / "allreduce-published.csv",
        tmp_path,
        lambda r: r["size_bytes"] in ("4096", "65536", "1048576", "16777216"),
    )
    found = validate(data, [train], machine("8x-rtx-pro-6000-switches")).to_dict()
    assert found["kind"] == "allreduce_csv"
    assert found["rows"] == 24
    assert {"mape", "median_ape", "max_ape", "coverage90", "worst"} <= set(found)
    graphed = [g for g in found["groups"] if "eager" not in g["name"]]
    assert all(group["mape"] < 0.08 for group in graphed)
    assert sum(count for reason, count in found["skipped"].items() if "L40S" in reason) == 24


def test_a_left_out_environment_is_predicted_and_other_links_are_left_out(tmp_path: Path) -> None:
    def chosen(row: dict[str, object]) -> bool:
        return row["env"] == {
            "NCCL_P2P_DISABLE": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple",
        }  # fmt: skip

    data, train = split_jsonl(PUBLISHED / "allreduce-h200x2.jsonl", tmp_path, chosen)
    found = validate(data, [train], machine("2x-h200-shm")).to_dict()
    assert found["rows"] == 17
    assert found["mape"] < 0.08
    whole = validate(train, [], machine("2x-h200-shm")).to_dict()
    assert list(whole["skipped"].values()) == [68]
    assert "nvlink" in next(iter(whole["skipped"]))


def test_steps_are_predicted_and_their_graphed_time_is_never_fitted(tmp_path: Path) -> None:
    data, train = split_jsonl(
        PUBLISHED / "step-h200x2.jsonl", tmp_path, lambda r: r["tokens"] in (4, 32)
    )
    reduces = PUBLISHED / "allreduce-h200x2.jsonl"
    host = machine("2x-h200-nvlink")
    found = validate(data, [train, reduces], host).to_dict()
    assert (found["kind"], found["rows"]) == ("step_jsonl", 8)
    assert found["median_ape"] < 0.05
    assert found["max_ape"] < 0.10
    eager = next(g for g in found["groups"] if g["name"] == "eager")
    assert eager["coverage90"] >= 0.7
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    train.write_text("\n".join(json.dumps({**r, "graph_us": 1.0}) for r in rows))
    again = validate(data, [train, reduces], host).to_dict()
    assert again["mape"] == found["mape"]


def test_left_out_token_counts_of_moe_layers_are_predicted(tmp_path: Path) -> None:
    data, train = split_csv(
        PUBLISHED / "moe-layer-published.csv", tmp_path, lambda r: r["tokens"] in ("16", "256")
    )
    host = machine("8x-rtx-pro-6000-switches")
    fitted = validate(data, [train], host).to_dict()
    prior = validate(data, [], host).to_dict()
    assert fitted["kind"] == "moe_csv"
    assert fitted["median_ape"] < 0.08
    assert fitted["median_ape"] < prior["median_ape"]
    assert prior["coverage90"] >= 0.85
    assert sum("priors" in note for note in prior["notes"]) == len(
        {(g["name"].split(",")[0], g["name"].split(",")[1]) for g in prior["groups"]}
    )


def acceptance_table(folder: Path) -> Path:
    """Six drafts, three data sets each, chains of 1 to 7: rates of a law with its own spread."""
    rng = np.random.default_rng(3)
    path = folder / "acceptance.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["target_model", "draft", "dataset", "temp", "steps", "topk",
                         "draft_tokens", "tau", "per_position"])  # fmt: skip
        for draft in range(6):
            base = rng.normal(0.9, 0.5)
            for data_set in range(3):
                first = 1 / (1 + np.exp(-base - rng.normal(0, 0.25)))
                ratio = np.exp(rng.normal(-0.05, 0.03))
                for steps in (1, 2, 3, 5, 7):
                    rates = first * ratio ** np.arange(steps)
                    tau = (1 + np.cumprod(rates).sum()) * np.exp(rng.normal(0, 0.02))
                    tau = min(max(tau, 1.0), steps + 1)
                    row = (f"m{draft}", "EAGLE3", f"d{data_set}", "0", steps, 1, steps + 1)
                    writer.writerow((*row, f"{tau:.3f}", ""))
        writer.writerow(("m0", "EAGLE3", "d0", "0", "", "tree", "", "4.1", ""))
    return path


@pytest.mark.parametrize(
    ("chosen", "group", "most"),
    [
        pytest.param(lambda r: r["steps"] == "7", "seen in other trees", 0.06, id="other-depth"),
        pytest.param(lambda r: r["dataset"] == "d2", "other data sets", 0.12, id="other-data-set"),
        pytest.param(lambda r: r["target_model"] == "m4", "not seen", 0.40, id="other-draft"),
    ],
)
def test_accept_lengths_widen_with_what_was_not_seen(
    tmp_path: Path, chosen: Callable[[dict[str, str]], bool], group: str, most: float
) -> None:
    data, train = split_csv(acceptance_table(tmp_path), tmp_path, chosen)
    found = validate(data, [train], machine("8x-l40s")).to_dict()
    assert [group in g["name"] for g in found["groups"]] == [True]
    assert found["median_ape"] < most
    assert found["coverage90"] >= 0.8


def test_published_accept_lengths_of_left_out_rows_are_covered(tmp_path: Path) -> None:
    source = tmp_path / "all.csv"
    source.write_bytes(acceptance_table(tmp_path).read_bytes())
    rng = np.random.default_rng(5)
    data, train = split_csv(source, tmp_path, lambda r: rng.random() < 0.3)
    found = validate(data, [train], machine("8x-l40s")).to_dict()
    assert found["median_ape"] < 0.06
    assert found["coverage90"] >= 0.8


@pytest.mark.parametrize(
    ("source", "column"),
    [
        pytest.param("allreduce-published.csv", "num_gpus", id="allreduce-csv"),
        pytest.param("moe-layer-published.csv", "routing", id="moe"),
        pytest.param("moe-layer-published.csv", "time_us", id="moe-time"),
    ],
)
def test_a_missing_column_is_named_with_its_file(tmp_path: Path, source: str, column: str) -> None:
    with open(PUBLISHED / source) as file:
        columns = [c for c in next(csv.reader(file)) if c != column]
    data, _ = split_csv(PUBLISHED / source, tmp_path, lambda r: True, columns)
    with pytest.raises(UserError, match=rf"data\.csv: column '{column}' is missing"):
        validate(data, [], machine("8x-l40s"))


@pytest.mark.parametrize("column", ["graph_us", "tokens", "gemms", "allreduce_bytes"])
def test_a_missing_field_of_a_step_is_named_with_file_and_line(tmp_path: Path, column: str) -> None:
    rows = [json.loads(x) for x in (PUBLISHED / "step-h200x2.jsonl").read_text().splitlines()]
    del rows[2][column]
    path = tmp_path / "steps.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match=rf"steps\.jsonl line 3: column '{column}' is missing"):
        validate(path, [], machine("2x-h200-nvlink"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "is empty", id="empty"),
        pytest.param('{"env": {}, "size_bytes": 1024}\n', "graph_us or eager_us", id="no-time"),
        pytest.param('{"env": {}, "size_bytes": -4, "graph_us": 9}\n', "size_bytes -4", id="size"),
        pytest.param('{"env": {}, "size_bytes": 4096, "graph_us": 9\n', "no JSON", id="cut"),
        pytest.param("a,b\n1,2\n", "no kind of data has these columns", id="foreign"),
        pytest.param("gpu,software,mode,num_gpus,size_bytes,time_us\nX,y,nccl,2,512\n",
                     "line 2: 5 values", id="short-row"),
        pytest.param("gpu,software,mode,num_gpus,size_bytes,time_us\nL40S,nccl 2.27.3,nccl,16,"
                     "512,9\n", "has 8 GPUs, not 16", id="too-many-ranks"),
        pytest.param("gpu,software,mode,num_gpus,size_bytes,time_us\nL40S,nccl 2.27.3,nccl,2,"
                     "512,nan\n", "time_us 'nan'", id="nan"),
    ],
)  # fmt: skip
def test_unusable_files_are_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "data.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        validate(path, [], machine("8x-l40s"))
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_a_fit_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tells nothing about moe_csv"):
        validate(
            PUBLISHED / "moe-layer-published.csv",
            [PUBLISHED / "allreduce-published.csv"],
            machine("8x-l40s"),
        )


def test_a_gpu_without_machine_is_predicted_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "moe.csv"
    with open(PUBLISHED / "moe-layer-published.csv") as file:
        lines = [next(file), *(line for line in file if line.startswith("L40S"))]
    path.write_text("".join(lines).replace("L40S", "B200"))
    found = validate(path, [], machine("8x-l40s")).to_dict()
    assert found["rows"] == len(lines) - 1
    assert any("rows of B200, predicted as if on a NVIDIA L40S" in n for n in found["notes"])


@pytest.mark.parametrize(
    ("name", "other", "same"),
    [
        ("RTX PRO 6000 Blackwell Server", "NVIDIA RTX PRO 6000 Blackwell Server Edition", True),
        ("H200 (NVLink)", "NVIDIA H200", True),
        ("H200 141GB SXM5", "NVIDIA H200", True),
        ("L40", "NVIDIA L40S", False),
        ("RTX 6000 Ada Generation", "NVIDIA RTX PRO 6000 Blackwell Server Edition", False),
    ],
)
def test_gpu_names_are_compared_by_what_tells_them_apart(name: str, other: str, same: bool) -> None:
    assert (gpu_words(name) == gpu_words(other)) is same
    assert of_this_gpu([name, None], other).tolist() == [same, True]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("allreduce-published.csv", "allreduce_csv"),
        ("moe-layer-published.csv", "moe_csv"),
        ("allreduce-h200x2.jsonl", "allreduce_jsonl"),
        ("step-h200x2.jsonl", "step_jsonl"),
    ],
)
def test_the_kind_is_found_by_content(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "renamed.dat"
    path.write_bytes(b"\xef\xbb\xbf" + (PUBLISHED / name).read_bytes())
    assert read_data_file(path).kind == kind


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["model", "validate", str(PUBLISHED / "step-h200x2.jsonl"), "--machine",
              "2x-h200-nvlink", "--json"])  # fmt: skip
    assert stop.value.code == 0
    values = json.loads(capsys.readouterr().out)
    assert values["kind"] == "step_jsonl"
    assert len(values["worst"]) == 5
    with pytest.raises(SystemExit) as stop:
        main(["model", "validate", "nowhere.csv", "--machine", "8x-l40s"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_show_prints_every_constant_with_its_prior_and_whether_data_tell_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["model", "show", "--machine", "8x-l40s", "--json"])
    assert stop.value.code == 0
    values = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in values["constants"]}
    assert {"launch_us", "allreduce.handoff_shm_us", "moe_dram_fraction"} <= set(rows)
    for row in rows.values():
        assert row["unit"]
        assert row["source"]
        assert row["prior90"][0] < row["prior"] < row["prior90"][1]
        assert row["told_by_data"] == "no: still the prior"
    with pytest.raises(SystemExit) as stop:
        main(["model", "show", "--machine", "8x-l40s", "--study", "x"])
    assert stop.value.code == 2


def test_nvidia_tables_become_a_file_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune.model_validation import nvidia
    from model.allreduce.nvidia_tables import records_of

    table = [
        {
            "device": "NVIDIA L40S", "op_name": "all_reduce", "kernel_source": "NCCL",
            "nccl_dtype": "half", "num_gpus": 2, "message_size": 2**k,
            "latency": 0.01 + 1e-7 * 2**k,
        }
        for k in range(8, 22)
    ]  # fmt: skip
    monkeypatch.setattr(
        nvidia, "read_nvidia_tables", lambda system, root: records_of(table, "nccl 2.27.3")
    )
    output = tmp_path / "nvidia.csv"
    assert nvidia.write_nvidia_tables("l40s", output) == 14
    found = validate(output, [output], machine("8x-l40s")).to_dict()
    assert found["rows"] == 14
    assert found["worst"][0]["measured"] >= 10.0
    assert ",512,10.0256" in output.read_text()
    monkeypatch.undo()
    with pytest.raises(SystemExit) as stop:
        main(["model", "import-nvidia-tables", "--gpu", "l40s", "-o", str(output)])
    assert stop.value.code == 2
    assert "pip install 'autotune-moe[nvidia-tables]'" in capsys.readouterr().err
