"""The report in every form says what the database holds, and escapes what others wrote."""

import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console
from study_files import sim_study, write_study

from autotune.cli.main import main
from autotune.errors import AutotuneError
from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.records import Failure
from autotune.report import show_outcome
from autotune.reporting.charts import Point, scatter
from autotune.reporting.content import FailedTrial, Report, gather
from autotune.reporting.markdown import markdown
from autotune.reporting.page import page
from autotune.reporting.values import report_mapping
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study
from model.spec import Interval

_EVIL = "<script>alert(1)</script> | `rm` & \"x\" 'y' [a](b)"


class _Page(HTMLParser):
    """Tags in order, checked for balance, and every URL."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.urls: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.seen.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href") and value]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    folder = tmp_path_factory.mktemp("report")
    failures = {"failures": {"oom": 0.5}, "slow_host_share": 0.0}
    workload = {**sim_study()["workload"], "concurrency": [1, 8]}
    values = sim_study(
        backend={"kind": "sim", "args": failures}, workload=workload, budget={"measured_trials": 6}
    )
    loaded = load_study(write_study(folder, values))
    plan = make_plan(loaded)
    store = Store.create(f"sqlite:///{folder}/a.db")
    view = create_study(loaded, plan, store)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        StudyRun(plan, view, store, Progress(Console(file=io.StringIO()), 6, (1, 8)),
                 StopFlag()).run()  # fmt: skip
    return gather(store, store.study("sim"))


def test_the_page_is_whole_and_needs_nothing_from_elsewhere(report: Report) -> None:
    text = page(report)
    parsed = _Page()
    parsed.feed(text)
    assert parsed.open == []
    assert parsed.urls == []
    assert "script" not in parsed.seen
    assert len(text) < 5_000_000
    assert report.outcome.verdict()[1:] in text
    for level in report.levels:
        assert level.outcome.knobs.label() in text
        assert f"{level.outcome.ratio.median:.3f} ×" in text
    assert len(report.failures) >= 1
    assert "simulated out of memory" in text


def test_text_from_outside_is_escaped_in_every_form(report: Report) -> None:
    failure = Failure(kind="crash", stage="measure", message=_EVIL, log_tail=_EVIL)
    evil = replace(
        report,
        failures=(FailedTrial(number=3, label=_EVIL, failure=failure),),
        compared=({"a": _EVIL, "b": _EVIL, "levels": [{"answer": _EVIL}]},),
        view=replace(report.view, name=_EVIL, label=_EVIL),
    )
    text = page(evil)
    parsed = _Page()
    parsed.feed(text)
    assert "script" not in parsed.seen
    assert "&lt;script&gt;" in text
    lines = markdown(evil).splitlines()
    assert not any("<script>" in line for line in lines if not line.startswith("autotune"))
    row = next(line for line in lines if line.startswith("- trial 3"))
    assert "\\|" in row
    assert "\\`rm\\`" in row


def test_markdown_tables_have_one_number_of_cells(report: Report) -> None:
    text = markdown(report)
    for block in text.split("\n\n"):
        if block.startswith("| "):
            counts = {line.replace("\\|", "").count("|") for line in block.splitlines()}
            assert len(counts) == 1
    assert "## Failures" in text


def test_the_scatter_draws_every_point_inside_its_frame() -> None:
    points = [
        Point(Interval(100.0 * k, 80.0 * k, 130.0 * k), 95.0 * k, c, f"<{k}>", is_baseline=k == 1)
        for k, c in ((1, 1), (3, 1), (20, 8))
    ]
    text = scatter(points, "tok/s")
    assert text.count('class="point"') == 3
    assert "&lt;3&gt;" in text
    one = scatter(points[:1], "tok/s")
    assert one.count('class="axis"') >= 4


def test_the_table_fits_100_columns(report: Report) -> None:
    console = Console(file=io.StringIO(), width=100)
    show_outcome(report.outcome, console)
    table = console.file.getvalue().split("c=1:")[0]  # type: ignore[attr-defined]
    assert "…" not in table
    rows = [line for line in table.splitlines() if line.strip()[:1].isdigit()]
    # no cell wraps: one line a level
    assert len(rows) == len(report.outcome.levels)


def test_a_study_of_failures_says_that_nothing_else_was_measured(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    backend = {"kind": "sim", "args": {"failures": {"incorrect": 1.0}}}
    loaded = load_study(write_study(tmp_path, sim_study(backend=backend)))
    plan = make_plan(loaded)
    store = Store.create("sqlite:///a.db")
    view = create_study(loaded, plan, store)
    progress = Progress(Console(file=io.StringIO()), 3, (1,))
    outcome = StudyRun(plan, view, store, progress, StopFlag()).run()
    assert outcome.verdict() == "only the baseline was measured: 3 other trials gave no number"
    console = Console(file=io.StringIO(), width=100)
    show_outcome(outcome, console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "baseline only" in shown
    assert "baseline is best" not in shown


@pytest.mark.parametrize("form", ["html", "md", "json"])
def test_the_command_writes_each_form(report: Report, form: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = report.database
    with pytest.raises(SystemExit) as ended:
        main(["study", "report", "sim", "-d", url, "-o", f"out/r.{form}"])
    assert ended.value.code == 0
    text = Path(f"out/r.{form}").read_text()
    if form == "json":
        assert json.loads(text)["verdict"] == report.outcome.verdict()
    else:
        assert "Study sim" in text


def test_an_unknown_form_is_refused(report: Report, capsys) -> None:
    for words in (["--format", "pdf"], ["-o", "r.txt"]):
        with pytest.raises(SystemExit) as ended:
            main(["study", "report", "sim", "-d", report.database, *words])
        assert ended.value.code == 2
    assert "name it .html, .md or .json" in capsys.readouterr().err


def test_without_a_baseline_the_report_says_why_and_offers_what_can_be_done(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failures = {"failures": {"oom": 0.999}, "slow_host_share": 0.0}
    loaded = load_study(write_study(tmp_path, sim_study(backend={"kind": "sim", "args": failures})))
    plan, store = make_plan(loaded), Store.create("sqlite:///a.db")
    view = create_study(loaded, plan, store)
    with pytest.raises(AutotuneError, match="the baseline can't be measured: oom"):
        StudyRun(plan, view, store, Progress(Console(file=io.StringIO()), 3, (1,)),
                 StopFlag()).run()  # fmt: skip
    found = gather(store, store.study("sim"))
    for text in (page(found), markdown(found)):
        assert "he baseline could not be measured: oom at" in text
        assert "autotune study resume sim" in text
        # nothing can be exported or compared yet
        assert "study best" not in text
        assert "autotune compare" not in text


def test_every_form_shows_the_fronts_of_several_objectives(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    objective = {"maximize": "tokens_per_s", "minimize": ["ttft_ms", "tpot_ms"]}
    loaded = load_study(
        write_study(tmp_path, sim_study(objective=objective, budget={"measured_trials": 4}))
    )
    plan, store = make_plan(loaded), Store.create("sqlite:///a.db")
    view = create_study(loaded, plan, store)
    StudyRun(plan, view, store, Progress(Console(file=io.StringIO()), 4, (1,)),
             StopFlag()).run()  # fmt: skip
    found = gather(store, store.study("sim"))
    (front,) = found.outcome.fronts
    for text in (page(found), markdown(found)):
        assert "Pareto front" in text
        for word in ("tok/s", "TTFT, ms", "TPOT, ms", "--trial N"):
            assert word in text
    values = report_mapping(found)
    assert len(values["pareto_fronts"][0]["points"]) == len(front.points)
    assert set(values["pareto_fronts"][0]["points"][0]["metrics"]) == {
        "tokens_per_s", "ttft_ms", "tpot_ms",
    }  # fmt: skip


def test_markdown_and_json_hold_the_facts_of_the_page(report: Report) -> None:
    values, text = report_mapping(report), markdown(report)
    points = values["predicted_against_measured"]
    assert len(points) == sum(
        level.predicted is not None and level.tokens_per_s is not None
        for trial in report.evidence.trials
        for level in trial.levels
    )
    inside = sum(point["inside"] for point in points)
    assert f"{inside} of {len(points)} measurements lie inside" in text
    assert f"{inside} of {len(points)} measurements lie inside" in page(report)
    for key in ("importances", "headroom", "next_steps", "commands", "noise_floors", "failures"):
        assert key in values
    for title in ("Noise floor", "Predicted against measured", "What matters", "Provenance"):
        assert f"## {title}" in text
        assert f"{title}</h2>" in page(report)
    assert json.dumps(values, default=str)
