"""The report as plain values: ``autotune study report --format json``."""

from dataclasses import asdict
from typing import Any

from autotune.explain.render import to_json
from autotune.report import outcome_mapping
from autotune.reporting.content import Report
from autotune.reporting.words import commands, flagged, next_steps, num_more, predicted_points


def report_mapping(report: Report) -> dict[str, Any]:
    """The outcome (as ``--json`` gives it) with everything else that the page shows."""
    return {
        **outcome_mapping(report.outcome),
        "noise_floors": {
            str(level): {"rel_floor": floor.rel_floor, "num_pairs": floor.num_pairs}
            for level, floor in sorted(report.noise_floors.items())
        },
        "explanations": {
            str(level.concurrency): to_json(level.explanation)
            for level in report.levels
            if level.explanation is not None
        },
        "predicted_against_measured": [
            {**asdict(point), "inside": point.inside} for point in predicted_points(report)
        ],
        "importances": {
            "concurrency": report.importance_level,
            "knobs": [asdict(item) for item in report.importances],
        },
        "next_steps": [
            {
                "concurrency": level,
                "lever": lever.name,
                "change": lever.change,
                "in_space": lever.in_space,
                "probability": lever.gain.probability,
                "speed_ratio": asdict(lever.gain.ratio),
            }
            for level, lever in next_steps(report)
        ],
        "headroom": [{"concurrency": level, **asdict(item)} for level, item in report.headroom],
        "repeats_show": flagged(report),
        "open_question": num_more(report),
        "commands": commands(report),
        "settings": [asdict(setting) for setting in report.settings],
        "failures": [
            {"trial": f.number, "label": f.label, **f.failure.model_dump(mode="json")}
            for f in report.failures
        ],
        "findings": [asdict(finding) for finding in report.findings],
        "comparisons": list(report.compared),
        "provenance": None
        if report.provenance is None
        else report.provenance.model_dump(mode="json"),
        "database": report.database,
    }
