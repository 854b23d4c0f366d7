"""Prompts of a study: what its workload says reaches the token ids."""

import json
from pathlib import Path

import pytest

from autotune.backends.engine_args import study_prompts
from autotune.errors import UserError
from autotune.study_file import load_study

MODELS = Path(__file__).parents[2] / "studies" / "models"
PLAIN = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
LOUD = "{% for m in messages %}<<{{ m['role'] }}>> {{ m['content'] }}{% endfor %}"


def study_file(folder: Path, template: str | None) -> Path:
    lines = [
        {"messages": [{"role": "user", "content": f"say {n} words about trees"}]} for n in "ab"
    ]
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    workload = {"prompts": "chat.jsonl", "input_len": 64, "output_len": 8, "concurrency": [2]}
    if template is not None:
        workload["chat_template"] = template
    study = {
        "name": "chat",
        "machine": "auto",
        "target": {"path": str(MODELS / "tiny-moe")},
        "workload": workload,
        "backend": {"kind": "engine", "args": {"device": "cpu"}},
        "objective": {"maximize": "tokens_per_s"},
        "space": {"speculation.method": ["off"]},
        "budget": {"measured_trials": 1, "wall_time": "1m"},
    }
    path = folder / "study.yaml"
    path.write_text(json.dumps(study))
    return path


def test_the_workloads_chat_template_shapes_the_prompts(tmp_path: Path) -> None:
    ids = {}
    for name, template in (("plain", PLAIN), ("loud", LOUD)):
        folder = tmp_path / name
        folder.mkdir()
        ids[name] = study_prompts(load_study(study_file(folder, template)).study, 2).token_ids
    assert ids["plain"] != ids["loud"]
    assert all(
        len(loud) > len(plain) for plain, loud in zip(ids["plain"], ids["loud"], strict=True)
    )


def test_chat_messages_without_any_template_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="chat_template"):
        study_prompts(load_study(study_file(tmp_path, None)).study, 2)
