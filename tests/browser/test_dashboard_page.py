"""A reader opens the dashboard on a finished study and reads a trial's note and the plots."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from chromium import CHROMIUM, Page, chromium
from rich.console import Console

from autotune.dashboard.evidence import StudyEvidence, read_evidence
from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

ROOT = Path(__file__).parents[2]
STUDY = {
    "name": "browser",
    "machine": str(ROOT / "studies" / "machines" / "8x-rtx-pro-6000-direct.yaml"),
    "target": {"shape": "qwen3-30b-a3b", "weights": "random"},
    "draft": {"shape": "qwen3-30b-a3b", "weights": "random"},
    "workload": {
        "prompts": "builtin:code",
        "input_len": 500,
        "output_len": 32,
        "concurrency": [1, 8],
    },
    "backend": {"kind": "sim", "args": {"slow_host_share": 0.0, "outlier_rate": 0.0}},
    "space": {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": {"int": [1, 3]},
        "speculation.topk": [1, 2],
        "speculation.draft_tokens": [4, 6],
        "parallel.tp": 8,
    },
    "budget": {"measured_trials": 5},
    "measure": {"min_repeats": 2, "max_repeats": 3, "target_rel_ci": 0.2},
    "seed": 3,
}


@dataclass(frozen=True)
class Open:
    """A browser on a served study, and what the database holds of it."""

    page: Page
    url: str
    study: StudyEvidence


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder = tmp_path_factory.mktemp("browser")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("study.yaml").write_text(yaml.safe_dump(STUDY))
        loaded = load_study(Path("study.yaml"))
        plan = make_plan(loaded)
        store = Store.create("sqlite:///autotune.db")
        view = create_study(loaded, plan, store)
        progress = Progress(Console(file=io.StringIO()), 5, (1, 8))
        StudyRun(plan, view, store, progress, StopFlag()).run()
        study = read_evidence(store, store.study("browser"))
        store.close()
    finally:
        os.chdir(before)
    command = [sys.executable, "-m", "autotune.cli.main", "dashboard", "browser", "--port", "0"]
    errors = (folder / "dashboard.log").open("w")
    server = subprocess.Popen(
        [*command, "--json"], cwd=folder, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    try:
        assert server.stdout is not None
        text = ""
        while not text.rstrip().endswith("}"):
            line = server.stdout.readline()
            assert line, (folder / "dashboard.log").read_text()
            text += line
        with chromium(folder) as page:
            yield Open(page, json.loads(text)["url"], study)
    finally:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        errors.close()


def contains(text: str) -> str:
    return f"document.body !== null && document.body.innerText.includes({json.dumps(text)})"


def test_a_trials_note_is_read_with_its_time_per_term(shown: Open) -> None:
    trial = next(t for t in shown.study.trials if t.trial.knobs.method == "eagle3" and t.levels)
    number = trial.trial.number
    shown.page.open(f"{shown.url}/trials?numbers={number}")
    shown.page.wait_for(contains(f"Trial {number}: {trial.trial.knobs.label()}"))
    shown.page.wait_for(contains("Time per cycle at concurrency 8"))
    rows = shown.page.run(
        "[...document.querySelectorAll('table tr')].map("
        "row => [...row.cells].map(cell => cell.innerText.trim()))"
    )
    level = trial.levels[0]
    measured = [row[3] for row in rows if row[0] == "verify.allreduce"]
    assert len(measured) == 2, "Markdown tables are not rendered as tables"
    assert measured[0] == f"{level.term_ms('verify.allreduce'):.3g}"
    text = shown.page.text()
    assert "Provenance" in text
    assert "Written by autotune dashboard" in text


def test_all_plots_are_drawn_on_the_studys_page(shown: Open) -> None:
    shown.page.open(shown.url)
    for title in (
        "Predicted against measured",
        "Optimisation history",
        "Where the time goes at concurrency 1",
        "Knobs that vary, and the measured speed",
        "Knob importances",
    ):
        shown.page.wait_for(contains(title))


def test_the_diagonal_plot_shows_one_mark_per_trial_and_level(shown: Open) -> None:
    shown.page.open(shown.url)
    shown.page.wait_for(contains("Predicted against measured"))
    script = (
        "(() => { const plot = [...document.querySelectorAll('.js-plotly-plot')]"
        ".find(p => p.innerText.includes('Predicted against measured'));"
        " return plot ? plot.querySelectorAll('.scatterlayer .point').length : 0; })()"
    )
    expected = sum(
        level.predicted is not None and level.tokens_per_s is not None
        for trial in shown.study.trials
        for level in trial.levels
    )
    assert expected >= 10
    shown.page.wait_for(f"{script} === {expected}")


def test_the_studys_note_gives_the_verdict(shown: Open) -> None:
    shown.page.open(f"{shown.url}/note")
    shown.page.wait_for(contains("Study browser"))
    assert "speed-up" in shown.page.text()
