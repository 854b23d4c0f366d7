"""Every public report and its variations: the right finding comes, and none that must not."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from autotune.lint.findings import RULES, Rule
from autotune.lint.log_signatures import SIGNATURES
from autotune.lint.run import Request, lint, load_machine_named, load_rules

CASES: list[dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[1] / "data" / "lint" / "cases.yaml").read_text()
)
#: ids of the rules that look at a machine's faults need a machine that has them
_CHANGES = "machine_changes"


def changed_machine(case: dict[str, Any], folder: Path) -> str | None:
    """The machine file of a case, with its changes."""
    name = case.get("machine")
    if _CHANGES not in case:
        return name
    values = load_machine_named(name).to_dict()
    for dotted, value in case[_CHANGES].items():
        section, _, field = dotted.partition(".")
        values[section][field] = value
        values["sources"].setdefault(section, "changed for a test")
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def findings_of(case: dict[str, Any], folder: Path) -> list[Any]:
    """What lint says about a case."""
    logs = ()
    if "log" in case:
        path = folder / "server.log"
        path.write_text(case["log"])
        logs = (path,)
    return lint(
        Request(
            engine=case["engine"],
            version=case.get("version"),
            args=case.get("args", ""),
            env=case.get("env", ""),
            machine=changed_machine(case, folder),
            target=case.get("target"),
            logs=logs,
            nccl_version=case.get("nccl_version"),
            concurrency=case.get("concurrency"),
            accept_length=case.get("accept_length"),
            baseline_tokens_per_s=case.get("baseline_tokens_per_s"),
        )
    )


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_case_gets_its_findings_each_with_reason_and_fix_and_no_wrong_one(
    case: dict[str, Any], tmp_path: Path
) -> None:
    findings = findings_of(case, tmp_path)
    found = {finding.id for finding in findings}
    assert set(case.get("expect", ())) <= found
    assert not set(case.get("never", ())) & found
    for rule_id, severity in case.get("severity", {}).items():
        assert severity in {finding.severity for finding in findings if finding.id == rule_id}
    for rule_id, subject in case.get("expect_subject", {}).items():
        assert subject in {finding.subject for finding in findings if finding.id == rule_id}
    inert = [f.subject for f in findings if f.reason.startswith("inert")]
    said = [name.split("=")[0] for subject in inert for name in subject.split(", ")]
    assert len(said) == len(set(said)), "one cause, one finding"
    for finding in findings:
        assert finding.subject
        assert len(finding.reason) > 15
        assert finding.source
        assert finding.fix or finding.severity == "info"


def test_case_ids_are_unique_and_name_known_rules() -> None:
    load_rules()
    known = set(RULES) | {signature.id for signature in SIGNATURES}
    assert len({case["id"] for case in CASES}) == len(CASES)
    for case in CASES:
        named = [*case.get("expect", ()), *case.get("never", ()), *case.get("expect_subject", {})]
        assert named, case["id"]
        assert not set(named) - known, case["id"]


def test_the_documentation_names_every_rule_and_the_findings_of_every_report() -> None:
    load_rules()
    text = (Path(__file__).parents[2] / "docs" / "lint.md").read_text()
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| ")]
    rows = {row[1].strip(): row[3] for row in cells if len(row) >= 4}
    for rule_id in (*RULES, *(signature.id for signature in SIGNATURES)):
        assert f"`{rule_id}`" in rows, rule_id
    for case in CASES:
        report = case.get("report")
        if report is None or report == "design.md":
            continue
        for finding_id in case.get("expect", ()):
            assert f"`{finding_id}`" in rows[report], case["id"]


def test_findings_stand_in_one_order_whoever_imported_the_rules_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    request = Request(
        engine="sglang",
        args="--tp 8 --speculative-algorithm EAGLE3 --disable-cuda-graph",
        env="NCCL_PROTO=LL NCCL_ALGO=Ring NCCL_MAX_NCHANNELS=2",
        machine="8x-rtx-pro-6000-switches",
        target="kimi-k2.5",
    )
    before = [(finding.id, finding.subject) for finding in lint(request)]
    assert len({name for name, _ in before}) > 3
    # modules registered backwards; rules of a module stay in their order
    modules: dict[str, dict[str, Rule]] = {}
    for name, rule in RULES.items():
        modules.setdefault(rule.function.__module__, {})[name] = rule
    backwards = {name: rule for some in reversed(modules.values()) for name, rule in some.items()}
    monkeypatch.setattr("autotune.lint.run.RULES", backwards)
    assert list(backwards) != list(RULES)
    assert [(finding.id, finding.subject) for finding in lint(request)] == before
