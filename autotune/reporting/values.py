"""The report as plain values: ``autotune study report --format json``."""

from dataclasses import asdict
from typing import Any

from autotune.explain.render import to_json
from autotune.report import outcome_mapping
from autotune.reporting.content import Report


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
