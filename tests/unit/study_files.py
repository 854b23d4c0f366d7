"""Study files for tests: a small one on the simulated host, and ways to change it."""

import copy
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
MACHINE = ROOT / "studies" / "machines" / "8x-rtx-pro-6000-direct.yaml"
CPU_MACHINE = ROOT / "studies" / "machines" / "cpu-2core.yaml"

_BASE: dict[str, Any] = {
    "name": "sim",
    "machine": str(MACHINE),
    "target": {"shape": "qwen3-30b-a3b", "weights": "random"},
    "draft": {"shape": "qwen3-30b-a3b", "weights": "random"},
    "workload": {
        "prompts": "builtin:code",
        "input_len": 500,
        "output_len": 32,
        "concurrency": [1],
    },
    "backend": {"kind": "sim", "args": {"slow_host_share": 0.0, "outlier_rate": 0.0}},
    "space": {
        "speculation.method": ["off", "eagle3"],
        "speculation.steps": {"int": [1, 3]},
        "speculation.topk": [1, 2],
        "speculation.draft_tokens": [4, 6],
        "parallel.tp": 8,
        "cuda_graph.verify": [False, True],
        "cuda_graph.decode": True,
    },
    "budget": {"measured_trials": 3},
    "measure": {"min_repeats": 2, "max_repeats": 3, "target_rel_ci": 0.2},
    "seed": 1,
}


def sim_study(**changes: Any) -> dict[str, Any]:
    """The small study with whole keys replaced; ``None`` removes a key."""
    values = copy.deepcopy(_BASE)
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value
    return values


def write_study(folder: Path, values: dict[str, Any], name: str = "study.yaml") -> Path:
    """Write a study file; its path."""
    path = folder / name
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return path
