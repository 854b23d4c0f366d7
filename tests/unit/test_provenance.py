"""Provenance and health: what is read, what is unknown, and that nothing is guessed."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.health import (
    GPU_FIELDS,
    REASON_FIELDS,
    decode_reasons,
    parse_gpu_query,
    query_gpus,
    snapshot,
    unhealthy,
)
from autotune.provenance import (
    collect_provenance,
    config_hash,
    git_state,
    package_versions,
    recorded_environment,
)
from autotune.records import Provenance, RankEnvironment

# the layout is the one of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`
HEALTHY = (
    "0, NVIDIA H200, GPU-aa, 580.82.07, 143771, 1980, 1980, 3201, 31, 118.40, 700.00, 34, 5, 5, "
    "16, 16, 0x0000000000000000\n"
)
SICK = (
    "3, NVIDIA RTX PRO 6000 Blackwell Workstation Edition, GPU-bb, 575.57.08, 97887, 1207, 3090, "
    "14001, [N/A], [Not Supported], 600.00, [N/A], 4, 5, 8, 16, 0x0000000000000044\n"
)


def nvidia_smi(text: str, topology: str | None = "GPU0 GPU1\n", old_driver: bool = False):
    """A stand-in for the command line: answers the query and the topology, else fails."""

    def run(command: Sequence[str]) -> str | None:
        if command[:2] == ("nvidia-smi", "topo"):
            return topology
        if old_driver and REASON_FIELDS[0] in command[1]:
            return None
        return text if command[0] == "nvidia-smi" else None

    return run


def no_commands(command: Sequence[str]) -> str | None:
    return None


def test_a_gpu_line_gives_every_value_with_its_unit() -> None:
    (gpu,) = parse_gpu_query(HEALTHY)
    assert (gpu.sm_clock_mhz, gpu.temperature_c, gpu.power_w) == (1980.0, 31.0, 118.4)
    assert (gpu.power_limit_w, gpu.utilization_percent) == (700.0, 34.0)
    assert (gpu.health().power_limit_w, gpu.health().utilization_percent) == (700.0, 34.0)
    assert (gpu.pcie_gen, gpu.pcie_gen_max, gpu.pcie_width, gpu.pcie_width_max) == (5, 5, 16, 16)
    assert gpu.throttle_reasons == ()


def test_values_that_the_driver_withholds_are_none_and_reasons_are_named() -> None:
    (gpu,) = parse_gpu_query(SICK)
    assert gpu.temperature_c is None
    assert gpu.power_w is None
    assert gpu.utilization_percent is None
    assert gpu.throttle_reasons == ("sw_power_cap", "hw_thermal_slowdown")
    assert gpu.health().device == "gpu3"


def test_a_line_with_other_fields_is_refused_with_the_line() -> None:
    with pytest.raises(ValueError, match=r"has 3 fields, 17 asked: '0, H200, x'"):
        parse_gpu_query("0, H200, x\n")


@pytest.mark.parametrize(
    ("mask", "names"),
    [
        pytest.param("0x0000000000000000", (), id="none"),
        pytest.param("0x0000000000000001", ("gpu_idle",), id="idle"),
        pytest.param("0x0000000000001008", ("hw_slowdown", "unknown_0x1000"), id="unknown-bit"),
        pytest.param("[N/A]", (), id="withheld"),
    ],
)
def test_throttle_mask_is_decoded(mask: str, names: tuple[str, ...]) -> None:
    assert decode_reasons(mask) == names


def test_an_old_driver_is_asked_by_the_old_name_of_the_reasons() -> None:
    assert len(query_gpus(nvidia_smi(HEALTHY, old_driver=True)) or ()) == 1


def test_snapshot_lists_each_gpu_and_falls_back_to_the_cpu() -> None:
    both = snapshot("cuda", nvidia_smi(HEALTHY + SICK))
    assert [health.device for health in both] == ["gpu0", "gpu3"]
    (host,) = snapshot("cuda", no_commands)
    assert host.device == "cpu"
    assert host.load_average is not None


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        pytest.param("3", ["gpu3"], id="by-index"),
        pytest.param("GPU-a", ["gpu0"], id="by-uuid"),
        pytest.param("3,0", ["gpu0", "gpu3"], id="both"),
    ],
)
def test_gpus_hidden_from_this_process_are_left_out(
    monkeypatch: pytest.MonkeyPatch, visible: str, devices: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [h.device for h in snapshot("cuda", nvidia_smi(HEALTHY + SICK))] == devices


def test_a_device_that_overheats_is_unhealthy_and_one_at_its_power_cap_is_not() -> None:
    healthy, sick = snapshot("cuda", nvidia_smi(HEALTHY + SICK))
    capped = healthy.model_copy(update={"throttle_reasons": ("sw_power_cap", "gpu_idle")})
    assert unhealthy([healthy], [capped]) is None
    assert unhealthy([healthy], [sick]) == "gpu3: hw_thermal_slowdown"


def test_a_gpu_host_gives_driver_link_and_topology() -> None:
    found = collect_provenance({"a": 1}, device="cuda", run=nvidia_smi(HEALTHY + SICK))
    assert found.driver == "580.82.07"
    assert found.pcie == ("gen 5 x16 (max gen 5 x16)", "gen 4 x8 (max gen 5 x16)")
    assert found.topology == "GPU0 GPU1\n"
    assert len(found.health) == 2
    assert not {"driver", "gpus", "pcie", "topology"} & set(found.unknown)


def test_every_empty_field_has_a_reason() -> None:
    found = collect_provenance({"a": 1}, device="cpu", run=no_commands)
    empty = {
        name
        for name, value in found.model_dump().items()
        if value in (None, (), "", {}) and name not in ("unknown",)
    }
    assert empty <= set(found.unknown), empty - set(found.unknown)
    assert found.unknown["gpus"] == "device is cpu, not cuda"
    assert found.cpu_affinity == tuple(sorted(os.sched_getaffinity(0)))


def test_provenance_survives_json() -> None:
    rank = RankEnvironment(rank=0, pid=7, environment={"NCCL_PROTO": "LL"})
    found = collect_provenance({"a": [1, None]}, device="cpu", ranks=[rank], run=no_commands)
    assert Provenance.model_validate_json(found.model_dump_json()) == found


def test_hash_ignores_the_order_of_keys_and_sees_every_value() -> None:
    assert config_hash({"a": 1, "b": {"c": 2, "d": 3}}) == config_hash(
        {"b": {"d": 3, "c": 2}, "a": 1}
    )
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_packages_that_make_the_number_are_listed_by_version() -> None:
    found = package_versions()
    assert {"torch", "numpy", "optuna"} <= set(found)
    assert "pytest" not in found


def _git(folder: Path, *arguments: str) -> str:
    command = ("git", "-C", str(folder), "-c", "user.name=t", "-c", "user.email=t@t", *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_commit_and_dirty_flag_are_those_of_the_code(tmp_path: Path) -> None:
    source = tmp_path / "autotune" / "provenance.py"
    source.parent.mkdir()
    source.write_text("x = 1\n")
    _git(tmp_path, "init", "-q")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    head = _git(tmp_path, "rev-parse", "HEAD")
    assert git_state(tmp_path) == (head, False, None)
    (tmp_path / "autotune.db").write_text("a database beside the code")
    assert git_state(tmp_path) == (head, False, None)
    source.write_text("x = 2\n")
    assert git_state(tmp_path) == (head, True, None)


def test_code_inside_somebody_elses_checkout_claims_no_commit(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    installed = tmp_path / "site-packages"
    (installed / "autotune").mkdir(parents=True)
    (installed / "autotune" / "provenance.py").write_text("x = 1\n")
    commit, dirty, why = git_state(installed)
    assert (commit, dirty) == (None, None)
    assert why == "the code does not run from a git checkout"


def test_the_query_asks_one_value_per_field() -> None:
    assert len(HEALTHY.split(",")) == len(GPU_FIELDS) + 1


def test_a_recorded_environment_holds_what_changes_a_run_and_no_secret() -> None:
    environment = {
        "NCCL_PROTO": "LL",
        "CUDA_VISIBLE_DEVICES": "0",
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": "hf_x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "VLLM_API_KEY": "x",
        "HOME": "/home/u",
        "DATABASE_URL": "postgresql://u:p@h/d",
    }
    kept = {"NCCL_PROTO", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
    assert set(recorded_environment(environment)) == kept
