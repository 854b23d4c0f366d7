"""A reader opens the report on a laptop and on a phone, by day and by night."""

import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from chromium import CHROMIUM, Page, chromium
from rich.console import Console
from test_dashboard_page import STUDY

from autotune.plan import create_study, make_plan
from autotune.progress import Progress
from autotune.reporting.content import Report, gather
from autotune.reporting.page import page as report_page
from autotune.stopping import StopFlag
from autotune.store.store import Store
from autotune.study import StudyRun
from autotune.study_file import load_study

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

WIDTHS = {"laptop": 1366, "phone": 390}


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Page, Report, str]]:
    folder = tmp_path_factory.mktemp("report")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("study.yaml").write_text(yaml.safe_dump({**STUDY, "name": "paper"}))
        loaded = load_study(Path("study.yaml"))
        plan = make_plan(loaded)
        store = Store.create("sqlite:///autotune.db")
        view = create_study(loaded, plan, store)
        progress = Progress(Console(file=io.StringIO()), 5, (1, 8))
        StudyRun(plan, view, store, progress, StopFlag()).run()
        report = gather(store, store.study("paper"))
    finally:
        os.chdir(before)
    (folder / "report.html").write_text(report_page(report), encoding="utf-8")
    with chromium(folder) as page:
        yield page, report, (folder / "report.html").as_uri()


def look(page: Page, url: str, width: int, scheme: str) -> None:
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width, height=900, deviceScaleFactor=1, mobile=width < 500,
    )  # fmt: skip
    feature = {"name": "prefers-color-scheme", "value": scheme}
    page.call("Emulation.setEmulatedMedia", features=[feature])
    page.open(url)
    page.wait_for("document.readyState === 'complete' && !!document.querySelector('#provenance')")


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_nothing_sticks_out_and_text_is_large_enough(
    shown: tuple[Page, Report, str], width: int
) -> None:
    page, _, url = shown
    look(page, url, width, "light")
    assert page.run("document.documentElement.scrollWidth") <= width
    # nothing but code may scroll sideways, and no text is cut
    wide = page.run(
        "[...document.querySelectorAll('.scroll, p, li, h1, h2, h3')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 60))"
    )
    assert wide == []
    smallest = page.run(
        "Math.min(...[...document.querySelectorAll('p,td,th,li,h1,h2,h3')]"
        ".filter(e => e.offsetParent).map(e => parseFloat(getComputedStyle(e).fontSize)))"
    )
    assert smallest >= 12


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(shown: tuple[Page, Report, str], scheme: str) -> None:
    page, _, url = shown
    look(page, url, 1366, scheme)
    colors = page.run(
        "(() => { const body = getComputedStyle(document.body).backgroundColor;"
        " return [...new Set([...document.querySelectorAll('p,td,th,li,h1,h2,span')]"
        ".filter(e => e.innerText && e.innerText.trim()).map(e => getComputedStyle(e).color))]"
        ".map(c => [c, body]); })()"
    )
    assert colors
    for text, background in colors:
        # WCAG AA for body text
        assert contrast(text, background) >= 4.5, (text, background)


def test_a_reader_finds_the_verdict_the_bars_and_every_trial(
    shown: tuple[Page, Report, str],
) -> None:
    page, report, url = shown
    look(page, url, 1366, "light")
    text = page.text()
    assert report.outcome.verdict()[1:] in text
    bars = page.run("document.querySelectorAll('.bar').length")
    assert bars == 2 * len(report.levels)
    # predicted stands above measured
    rows = page.run(
        "[...document.querySelectorAll('.bars')].map(b => b.innerText.indexOf('predicted')"
        " < b.innerText.indexOf('measured'))"
    )
    assert all(rows)
    points = page.run("document.querySelectorAll('svg .point').length")
    expected = sum(
        level.predicted is not None and level.tokens_per_s is not None
        for trial in report.evidence.trials
        for level in trial.levels
    )
    assert points == expected >= 8
    for heading in ("Noise floor", "What matters", "Failures", "What to try next", "Provenance"):
        assert heading in text


def test_the_page_asks_the_network_for_nothing(shown: tuple[Page, Report, str]) -> None:
    page, _, url = shown
    look(page, url, 1366, "light")
    assert page.run("performance.getEntriesByType('resource').length") == 0


def contrast(first: str, second: str) -> float:
    """WCAG 2 contrast ratio of two ``rgb(...)`` colours."""
    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    parts = [float(part) / 255 for part in color[color.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
