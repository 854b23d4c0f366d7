"""Study files: what is accepted, and the one line that every mistake gets."""

from pathlib import Path

import pytest
import yaml
from study_files import ROOT, sim_study, write_study

from autotune.errors import UserError
from autotune.schemas import parse_duration_s
from autotune.study_file import load_study


def problems(tmp_path: Path, values: dict) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_study(write_study(tmp_path, values))
    return str(caught.value).splitlines()


def test_a_study_is_read_with_ranges_spelled_out_and_sizes_in_bytes(tmp_path: Path) -> None:
    space = {"speculation.steps": {"int": [1, 3]}, "nccl.buffsize": ["auto", "1MiB"]}
    study = load_study(write_study(tmp_path, sim_study(space=space))).study
    assert study.space["speculation.steps"] == (1, 2, 3)
    assert study.space["nccl.buffsize"] == ("auto", 1 << 20)


def test_relative_paths_start_at_the_study_file(tmp_path: Path) -> None:
    values = sim_study(target={"path": "models/t"}, machine="hosts/a.yaml")
    study = load_study(write_study(tmp_path, values)).study
    assert study.target.path == tmp_path / "models" / "t"
    assert study.machine == str(tmp_path / "hosts" / "a.yaml")


def test_off_is_a_word_not_a_boolean(tmp_path: Path) -> None:
    text = yaml.safe_dump(sim_study()).replace("- 'off'", "- off")
    assert "- off" in text
    path = tmp_path / "s.yaml"
    path.write_text(text)
    assert load_study(path).study.space["speculation.method"] == ("off", "eagle3")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        pytest.param({"wrkload": 1}, ["wrkload: unknown key; did you mean workload?"], id="key"),
        pytest.param(
            {"space": {"speculation.step": [1]}},
            ["space.speculation.step: unknown knob; did you mean speculation.steps?"],
            id="knob",
        ),
        pytest.param(
            {"budget": {"measured_trials": "many"}},
            ["budget.measured_trials: 'many' is not allowed; allowed: an integer"],
            id="wrong-type",
        ),
        pytest.param(
            {"budget": {"measured_trials": True}},
            ["budget.measured_trials: True is not allowed; allowed: an integer"],
            id="bool-for-int",
        ),
        pytest.param(
            {"budget": {"measured_trials": 3, "wall_time": 6}},
            ["budget.wall_time: 6 is no duration; write for example 90s, 45m, 6h or 1h30m"],
            id="duration-without-unit",
        ),
        pytest.param({"draft": None}, ["no draft is given; add draft"], id="no-draft"),
        pytest.param({"budget": None}, ["budget: is missing; add it"], id="missing"),
        pytest.param(
            {"space": {"nccl.buffsize": "1Mib"}},
            ["space.nccl.buffsize: '1Mib' is not allowed; allowed: auto or a size such as 16MiB"],
            id="size",
        ),
        pytest.param(
            {"space": {"speculation.steps": {"int": [3, 1]}}},
            ["space.speculation.steps: range [3, 1] is empty"],
            id="empty-range",
        ),
        pytest.param(
            {"space": {"speculation.steps": []}},
            ["space.speculation.steps: lists no value"],
            id="empty-list",
        ),
        pytest.param(
            {"target": {"path": "x", "weights": "random"}},
            ["target: weights and layers go with shape; a path brings its own"],
            id="target-two-sources",
        ),
        pytest.param(
            {"measure": {"min_repeats": 9, "max_repeats": 3}},
            ["measure: min_repeats 9 is above max_repeats 3"],
            id="repeats",
        ),
        pytest.param(
            {"objective": {"maximize": "speed"}},
            ["objective.maximize: 'speed' is not allowed; allowed: 'tokens_per_s'"],
            id="metric",
        ),
        pytest.param({"name": "a/b"}, ["name: 'a/b' has to do as a file name"], id="name"),
        pytest.param(
            {"measure": {"target_rel_ci": float("nan")}}, ["measure.target_rel_ci: nan"], id="nan"
        ),
    ],
)
def test_a_mistake_gets_one_line_with_file_line_key_and_way_out(
    tmp_path: Path, changes: dict, parts: list[str]
) -> None:
    lines = problems(tmp_path, sim_study(**changes))
    assert len(lines) == 1
    assert lines[0].startswith(str(tmp_path / "study.yaml"))
    for part in parts:
        assert part in lines[0]


def test_every_problem_of_a_file_is_reported_at_once(tmp_path: Path) -> None:
    space = {"nccl.algo": ["star"], "nccl.protoo": ["LL"]}
    lines = problems(tmp_path, sim_study(space=space, wrkload=1))
    assert len(lines) == 3


def test_a_line_number_points_at_the_key(tmp_path: Path) -> None:
    path = write_study(tmp_path, sim_study(seed="one"))
    number = path.read_text().splitlines().index("seed: one") + 1
    with pytest.raises(UserError, match=rf"study.yaml:{number}: seed: 'one' is not allowed"):
        load_study(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a: [1,\nb: 2", "s.yaml:2: not valid YAML", id="syntax"),
        pytest.param("name: x\nname: y", "s.yaml:2: name is given twice", id="duplicate"),
        pytest.param("", "this file is empty", id="empty"),
        pytest.param("- 1", "this file is a list", id="list"),
        pytest.param("a: \x00", "not valid YAML", id="control-character"),
    ],
)
def test_a_file_that_is_no_study_says_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        load_study(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_study(tmp_path / "absent.yaml")
    with pytest.raises(UserError, match="is a folder"):
        load_study(tmp_path)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("6h", 21600), ("1h30m", 5400), ("2d", 172800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


def test_shipped_studies_are_valid() -> None:
    found = sorted((ROOT / "studies").glob("*.yaml"))
    assert found
    for path in found:
        load_study(path)
