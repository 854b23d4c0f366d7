"""What the tool reads of a GPU host: health, the rules on it, the doctor, ``machine: auto``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from contract_harness import ROOT, study_of
from gpu_faults import load

from autotune.health import query_gpus, snapshot
from autotune.health_rules import spins
from autotune.hosts import check_host, study_machine
from autotune.probe.run import has_nvidia_gpu

pytestmark = pytest.mark.gpu

_TINY = ROOT / "studies" / "models"


def test_every_gpu_has_a_reading_with_clock_power_and_limit() -> None:
    states = query_gpus()
    assert states is not None
    assert len(states) == torch.cuda.device_count()
    for state in states:
        assert state.name == torch.cuda.get_device_name(state.index)
        assert state.driver
        for name in ("sm_clock_mhz", "max_sm_clock_mhz", "temperature_c", "power_w"):
            assert (getattr(state, name) or 0) > 0, name
        assert (state.power_limit_w or 0) > (state.power_w or 0) * 0.5
        assert state.throttle_reasons is not None


@pytest.mark.parametrize(("kind", "waits"), [("spin", True), ("matmul", False)])
def test_a_gpu_that_only_waits_is_told_from_one_that_works(kind: str, waits: bool) -> None:
    with load(kind):
        health = snapshot("cuda")[0]
    used, power = health.utilization_percent, health.power_w
    assert used is not None
    assert power is not None
    assert used >= 95
    assert spins(used, power, health.power_limit_w) == waits, health


def test_machine_auto_is_this_host_with_its_gpus(tmp_path: Path) -> None:
    assert has_nvidia_gpu()
    study = study_of("engine", {"device": "cuda"}, _TINY / "tiny-moe")
    machine = study_machine(study)
    assert machine.gpu is not None
    assert machine.num_gpus == torch.cuda.device_count()
    assert machine.gpu.name == torch.cuda.get_device_name(0)
    check_host(study, machine)


def test_the_doctor_sees_the_gpus_and_no_fault_of_the_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune.cli.main", "doctor", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = json.loads(done.stdout)
    wrong = [f for f in found["findings"] if f["id"] in ("torch", "triton", "cuda", "driver")
             and f["severity"] == "error"]  # fmt: skip
    assert not wrong
    assert any("GPU" in f["subject"] or "gpu" in f["subject"] for f in found["findings"])


def launch_file(folder: Path, tp: int, nccl: dict[str, object]) -> Path:
    """A launch config of the shipped tiny model."""
    path = folder / "launch.yaml"
    config = {
        "target": {"path": str(_TINY / "tiny-moe")},
        "draft": {"path": str(_TINY / "tiny-moe-eagle3")},
        "device": "cuda",
        "dtype": "bfloat16",
        "tp": tp,
        "max_context": 256,
        "nccl": nccl,
        "cuda_graph": {"decode": True, "draft": True, "verify": True, "extend": True},
        "schedule": [
            {
                "max_concurrency": 1,
                "speculation": {"method": "eagle3", "steps": 3, "topk": 1, "draft_tokens": 4},
            }
        ],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("nccl", "shell", "verdict"),
    [
        pytest.param({}, "LL", "not effective", id="exported-in-the-shell"),
        pytest.param({"proto": "LL"}, None, "effective", id="in-the-launch-config"),
    ],
)
def test_env_check_follows_a_setting_into_the_workers(
    nccl: dict[str, object], shell: str | None, verdict: str, tmp_path: Path
) -> None:
    tp = min(torch.cuda.device_count(), 2)
    if verdict == "effective" and tp == 1:
        pytest.skip("one rank makes no communicator: nothing would show that NCCL used it")
    config = launch_file(tmp_path, tp, nccl)
    assignment = [] if shell is None else [f"NCCL_PROTO={shell}"]
    done = subprocess.run(
        # the bench ends by itself, long before that
        [sys.executable, "-m", "autotune.cli.main", "env", "check", "--run", "100", "--json",
         "--expect", "NCCL_PROTO=LL", "--", *assignment, sys.executable, "-m", "engine", "bench",
         "--config", str(config), "--repeats", "20"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    (knob,) = (k for k in json.loads(done.stdout)["knobs"] if k["name"] == "NCCL_PROTO")
    assert knob["verdict"] == verdict, knob
    if verdict == "not effective":
        assert "engine.worker" in knob["lost_at"]
        assert done.returncode == 1
