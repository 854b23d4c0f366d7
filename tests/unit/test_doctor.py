"""``autotune doctor`` on recorded hosts: what it finds, and that it never passes without data."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.cli.main import main
from autotune.doctor.diagnose import Diagnosis, diagnose
from autotune.doctor.findings import Finding
from autotune.doctor.load import Answer, link_under_load
from autotune.doctor.sources import read_folder, record_host

DATA = Path(__file__).parents[1] / "data" / "doctor"


def run(case: str | Path) -> Diagnosis:
    return diagnose(read_folder(DATA / case))


def of(diagnosis: Diagnosis, check: str) -> list[Finding]:
    return [finding for finding in diagnosis.findings if finding.id == check]


def severities(diagnosis: Diagnosis, check: str) -> set[str]:
    return {finding.severity for finding in of(diagnosis, check)}


def copy_of(case: str, folder: Path, *leave_out: str) -> Path:
    target = folder / case
    shutil.copytree(DATA / case, target)
    for name in leave_out:
        (target / name).unlink()
    return target


FAULTS = [
    ("amd-8gpu-faults", "pcie-link", "error", "GPU 2 (0000:41:00.0)", "Gen1 x8, Gen5 x16"),
    ("amd-8gpu-faults", "acs-redirect", "error", "8 root ports", "ReqRedir"),
    ("amd-8gpu-faults", "iommu", "error", "host", "translates"),
    ("amd-8gpu-faults", "throttling", "error", "GPU 4 (0000:81:00.0)", "93 °C"),
    ("amd-8gpu-faults", "power-cap", "warning", "GPU 5 (0000:a1:00.0)", "300 W is 50%"),
    ("amd-8gpu-faults", "persistence", "warning", "GPU 7 (0000:e1:00.0)", "off"),
    ("amd-8gpu-faults", "gpu-busy", "warning", "GPU 0 (0000:01:00.0)", "pid 41877, 61234 MiB"),
    ("amd-8gpu-faults", "hmm", "warning", "host", "HMM is on"),
    ("amd-8gpu-faults", "aspm", "warning", "root port 0000:c0:01.1", "L1 is enabled"),
    ("amd-8gpu-faults", "pcie-errors", "warning", "GPU 2 (0000:41:00.0)", "48211"),
    ("amd-8gpu-faults", "cpu-governor", "warning", "host", "schedutil on 8 of 8"),
    ("amd-8gpu-faults", "kernels-package", "warning", "Python", "0.10.4"),
    ("amd-8gpu-faults", "cpu-affinity", "warning", "GPU 0000:81:00.0", "NUMA node 1"),
    ("intel-switch-narrow-uplink", "pcie-path", "error", "switch uplink 0000:16:00.0", "Gen4 x8"),
    ("intel-switch-narrow-uplink", "acs-redirect", "error", "4 switch ports", "0000:17:03.0"),
    ("intel-switch-narrow-uplink", "p2p", "error", "3 of 6 GPU pairs", "CNS"),
    ("intel-switch-narrow-uplink", "bar-size", "error", "GPU 3 (0000:1e:00.0)", "256 MiB"),
    ("intel-switch-narrow-uplink", "torch-cuda", "error", "Python", "CUDA 12.2"),
    ("intel-switch-narrow-uplink", "throttling", "warning", "GPU 1 (0000:1c:00.0)", "power limit"),
    ("consumer-2x-idle-old-driver", "pcie-link", "error", "GPU 1 (0000:0b:00.0)", "x8"),
    ("consumer-2x-idle-old-driver", "torch-cuda", "error", "Python", "without CUDA"),
    ("fell-off-the-bus", "gpu-present", "error", "GPU 0000:41:00.0", "fell off the bus"),
    ("fell-off-the-bus", "driver", "error", "host", "couldn't communicate"),
]


@pytest.mark.parametrize(
    ("case", "check", "severity", "subject", "words"),
    FAULTS,
    ids=[f"{case}-{check}" for case, check, *_ in FAULTS],
)
def test_finds_the_fault_with_its_place_its_number_and_a_way_out(
    case: str, check: str, severity: str, subject: str, words: str
) -> None:
    found = [
        finding
        for finding in of(run(case), check)
        if finding.subject.startswith(subject) and words in finding.reason
    ]
    assert found, [(f.subject, f.reason) for f in of(run(case), check)]
    assert found[0].severity == severity
    assert found[0].fix


def test_the_same_host_put_right_has_no_fault_and_nothing_unknown() -> None:
    diagnosis = run("amd-8gpu-healthy")
    assert {finding.severity for finding in diagnosis.findings} <= {"ok", "info"}
    assert not diagnosis.has_errors


def test_only_the_faulty_gpu_is_blamed() -> None:
    links = of(run("amd-8gpu-faults"), "pcie-link")
    assert [f.subject for f in links if f.severity != "ok"] == ["GPU 2 (0000:41:00.0)"]
    assert sum(f.severity == "ok" for f in links) == 7


def test_an_idle_gpu_at_a_low_speed_is_unknown_and_not_a_fault() -> None:
    links = {f.subject: f for f in of(run("consumer-2x-idle-old-driver"), "pcie-link")}
    idle = links["GPU 0 (0000:0a:00.0)"]
    assert idle.severity == "unknown"
    assert "idle" in idle.reason
    # its width does not depend on the load
    assert links["GPU 1 (0000:0b:00.0)"].severity == "error"


@pytest.mark.parametrize(
    ("gen", "severity"),
    [pytest.param(4, "ok", id="wakes-up"), pytest.param(1, "error", id="stays")],
)
def test_a_reading_under_load_decides_what_the_idle_one_could_not(
    gen: int, severity: str, tmp_path: Path
) -> None:
    folder = copy_of("consumer-2x-idle-old-driver", tmp_path)
    text = (folder / "nvidia-smi.xml").read_text()
    (folder / "nvidia-smi-load.xml").write_text(
        text.replace("<current_link_gen>1<", f"<current_link_gen>{gen}<")
    )
    links = {f.subject: f for f in of(run(folder), "pcie-link")}
    assert links["GPU 0 (0000:0a:00.0)"].severity == severity
    assert "while copying" in links["GPU 0 (0000:0a:00.0)"].reason


def test_gpus_are_made_to_work_only_when_one_is_idle_below_its_link() -> None:
    healthy = (DATA / "amd-8gpu-healthy" / "nvidia-smi.xml").read_text()
    idle = (DATA / "consumer-2x-idle-old-driver" / "nvidia-smi.xml").read_text()

    def never(command: object) -> Answer:
        raise AssertionError(f"{command} was run")

    assert "not needed" in link_under_load(healthy, "torch==2.11.0+cu130\n", never).problem
    assert "no torch with CUDA" in link_under_load(idle, "torch==2.13.0+cpu\n", never).problem


def test_nvlink_makes_pcie_settings_between_gpus_no_errors(tmp_path: Path) -> None:
    folder = copy_of("h200-2x-nvlink-vm", tmp_path)
    (folder / "cmdline.txt").write_text("ro intel_iommu=on\n")
    text = (folder / "sys.txt").read_text().replace("iommu_groups/count:0", "iommu_groups/count:4")
    (folder / "sys.txt").write_text(text)
    diagnosis = run(folder)
    assert severities(diagnosis, "iommu") == {"warning"}
    assert not diagnosis.has_errors


@pytest.mark.parametrize("check", ["pcie-path", "acs-redirect", "aspm", "pcie-errors"])
def test_a_virtual_machine_that_hides_root_ports_is_never_ok(check: str) -> None:
    assert severities(run("h200-2x-nvlink-vm"), check) == {"unknown"}


@pytest.mark.parametrize("check", ["acs-redirect", "aspm", "pcie-errors", "pcie-path"])
def test_lspci_without_root_gives_unknown_run_as_root(check: str, tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path)
    kept = []
    for line in (folder / "lspci-vv.txt").read_text().splitlines():
        if line.startswith("\tCapabilities: [78]"):
            kept.append("\tCapabilities: <access denied>")
        elif not line.startswith(("\tCapabilities", "\t\t")):
            kept.append(line)
    (folder / "lspci-vv.txt").write_text("\n".join(kept) + "\n")
    found = [f for f in of(run(folder), check) if f.severity != "info"]
    assert {f.severity for f in found} == {"unknown"}
    assert "run as root" in found[0].fix


GPU_EVIDENCE = {
    "lspci-vv.txt": ["acs-redirect", "aspm", "pcie-errors", "pcie-path"],
    "nvidia-smi.xml": ["bar-size", "gpu-state"],
    "topo-p2p-r.txt": ["p2p"],
    "sys.txt": ["cpu-governor"],
    "packages.txt": ["packages"],
}


@pytest.mark.parametrize("state", ["missing", "empty", "garbage"])
@pytest.mark.parametrize("name", GPU_EVIDENCE)
def test_evidence_that_is_not_there_never_makes_a_check_pass(
    name: str, state: str, tmp_path: Path
) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path, name)
    if state == "empty":
        (folder / name).write_text("\n")
    elif state == "garbage" and name not in ("sys.txt", "packages.txt"):
        (folder / name).write_text("bash: command not found\n")
    diagnosis = run(folder)
    for check in GPU_EVIDENCE[name]:
        assert severities(diagnosis, check) == {"unknown"}, check


def test_an_iommu_that_only_the_kernel_could_tell_is_unknown(tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path, "sys.txt", "cmdline.txt")
    assert severities(run(folder), "iommu") == {"unknown"}


def test_a_cut_lspci_leaves_the_rest_unknown(tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path)
    text = (folder / "lspci-vv.txt").read_text()
    (folder / "lspci-vv.txt").write_text(text[: len(text) // 2])
    diagnosis = run(folder)
    missing = [f for f in of(diagnosis, "pcie-path") if f.severity == "unknown"]
    assert any("cut" in finding.reason for finding in missing)
    for check in ("aspm", "pcie-errors", "acs-redirect"):
        assert severities(diagnosis, check) == {"unknown"}, check


def test_a_cut_nvidia_smi_is_said(tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path)
    text = (folder / "nvidia-smi.xml").read_text()
    (folder / "nvidia-smi.xml").write_text(text[: len(text) // 2])
    found = of(run(folder), "gpu-present")
    assert [f.severity for f in found] == ["unknown"]
    assert "of 8 GPUs" in found[0].reason


def test_a_gpu_that_the_driver_lost_is_an_error(tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path)
    text = (folder / "nvidia-smi.xml").read_text()
    start = text.index('\t<gpu id="00000000:E1:00.0">')
    end = text.index("</gpu>\n", start) + len("</gpu>\n")
    text = (text[:start] + text[end:]).replace(">8</attached_gpus>", ">7</attached_gpus>")
    (folder / "nvidia-smi.xml").write_text(text)
    found = [f for f in of(run(folder), "gpu-present") if f.severity == "error"]
    assert [f.subject for f in found] == ["GPU 0000:e1:00.0"]


def test_a_slot_slower_than_its_card_is_a_warning(tmp_path: Path) -> None:
    folder = copy_of("amd-8gpu-healthy", tmp_path)
    text = (folder / "nvidia-smi.xml").read_text()
    for name, value in (("max_host", 4), ("max", 4), ("current", 4)):
        text = text.replace(
            f"<{name}_link_gen>5</{name}_link_gen>", f"<{name}_link_gen>{value}</{name}_link_gen>"
        )
    (folder / "nvidia-smi.xml").write_text(text)
    found = of(run(folder), "pcie-link")
    assert {f.severity for f in found} == {"warning"}
    assert "the card can Gen5, its port Gen4" in found[0].reason


def test_a_host_without_gpu_says_what_does_not_apply() -> None:
    diagnosis = run("cpu-only")
    assert not diagnosis.has_errors
    assert severities(diagnosis, "gpus") == {"info"}
    assert not of(diagnosis, "acs-redirect")


def test_a_folder_without_any_look_at_the_bus_does_not_claim_that_there_is_no_gpu(
    tmp_path: Path,
) -> None:
    (tmp_path / "cmdline.txt").write_text("ro quiet\n")
    diagnosis = run(tmp_path)
    assert not of(diagnosis, "gpus")
    assert severities(diagnosis, "acs-redirect") == {"unknown"}


def test_a_live_host_without_tools_reports_them_and_does_not_fail() -> None:
    recording = record_host(lambda command: Answer(None, f"{command[0]} is not installed"))
    assert recording.missing["lspci"].reason == "lspci is not installed"
    assert "pciutils" in recording.missing["lspci"].fix
    assert diagnose(recording).findings


def test_what_was_saved_reads_back_to_the_same_findings(tmp_path: Path) -> None:
    recording = read_folder(DATA / "intel-switch-narrow-uplink")
    recording.save(tmp_path / "copy")
    again = diagnose(read_folder(tmp_path / "copy")).findings
    told = [(f.id, f.severity, f.subject) for f in diagnose(recording).findings]
    assert [(f.id, f.severity, f.subject) for f in again] == told


def test_why_a_tool_gave_nothing_is_saved_with_the_rest(tmp_path: Path) -> None:
    said = "`nvidia-smi -q -x` failed (exit code 9): NVIDIA-SMI has failed because it couldn't talk"
    text = (DATA / "amd-8gpu-healthy" / "lspci-vv.txt").read_text()

    def run_tool(command: Sequence[str]) -> Answer:
        return Answer(text) if command[0] == "lspci" else Answer(None, said)

    record_host(run_tool).save(tmp_path)
    found = of(run(tmp_path), "driver")
    assert [f.severity for f in found] == ["error"]
    assert "NVIDIA-SMI has failed" in found[0].reason


@pytest.mark.parametrize(
    ("case", "code"), [("amd-8gpu-healthy", 0), ("amd-8gpu-faults", 1), ("cpu-only", 0)]
)
def test_the_exit_code_tells_whether_an_error_was_found(
    case: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--from", str(DATA / case), "--json"])
    assert ended.value.code == code
    answer = json.loads(capsys.readouterr().out)
    assert (answer["summary"]["error"] > 0) == (code == 1)
    assert answer["findings"][0].keys() == {"id", "severity", "subject", "reason", "fix"}


@pytest.mark.parametrize("kind", ["absent", "file", "nothing-known"])
def test_a_useless_folder_is_a_user_mistake(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "recorded"
    if kind == "file":
        place.write_text("x")
    elif kind == "nothing-known":
        place.mkdir()
        (place / "holiday.jpg").write_text("x")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--from", str(place)])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(place) in line


def test_the_text_names_errors_first_and_one_fix_each(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--from", str(DATA / "amd-8gpu-faults")])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ERROR")
    assert sum(line.startswith("ERROR") for line in lines) == 5
    assert not any(line.startswith("OK") for line in lines[:10])


CUTS = [
    (case.name, file.name)
    for case in sorted(DATA.iterdir())
    for file in sorted(case.iterdir())
    if "faults" in case.name or "narrow" in case.name
]


@pytest.mark.parametrize(("case", "name"), CUTS, ids=[f"{c}-{n}" for c, n in CUTS])
def test_a_fault_is_not_declared_fine_when_a_file_is_cut_anywhere(
    case: str, name: str, tmp_path: Path
) -> None:
    broken = {f.id for f in run(case).findings if f.severity == "error"}
    folder = copy_of(case, tmp_path)
    text = (folder / name).read_text()
    for cut in range(1, 20):
        (folder / name).write_text(text[: len(text) * cut // 20])
        diagnosis = run(folder)
        for check in broken:
            assert severities(diagnosis, check) != {"ok"}, (check, cut)
