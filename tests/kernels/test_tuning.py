"""The configuration cache, the candidates and compiling without a GPU."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import attention_kernel, linear, moe_down, moe_gate_up, router, tune, tuning
from kernels.candidates import candidates_for
from kernels.catalog import ODD, layer_cases
from kernels.compile_unit import SHARED_LIMIT_BYTES
from kernels.launch import recording
from kernels.opset import opset
from kernels.shared_memory import estimated_shared_bytes, fitting

ROOT = Path(__file__).resolve().parents[2]


def test_a_saved_configuration_is_found_again_and_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "kernels.json"
    tuning.save(path, "GPU A", "norm_linear", "T=1", {"block_o": 8})
    tuning.save(path, "GPU B", "norm_linear", "T=1", {"block_o": 4})
    tuning.save(path, "GPU A", "norm_linear", "T=4", {"block_o": 16})
    assert tuning.load(path) == {
        "GPU A": {"norm_linear": {"T=1": {"block_o": 8}, "T=4": {"block_o": 16}}},
        "GPU B": {"norm_linear": {"T=1": {"block_o": 4}}},
    }
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text", ["{", '{"a": 1}', '{"a": {"b": {"c": {"d": "x"}}}}', "[1]"], ids=str
)
def test_a_broken_cache_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"kernels\.json cannot be read .*python -m kernels\.tune"):
        tuning.load(path)


def test_the_path_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(tuning.PATH_VARIABLE, "/somewhere/k.json")
    assert tuning.default_path() == Path("/somewhere/k.json")
    monkeypatch.delenv(tuning.PATH_VARIABLE)
    assert tuning.default_path().parts[-3:] == (".cache", "autotune", "kernels.json")


def test_shipped_configurations_fill_what_the_cache_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    monkeypatch.setenv(tuning.PATH_VARIABLE, str(tmp_path / "own.json"))
    gpu = "NVIDIA RTX PRO 6000 (96 GB)"
    assert tuning.lookup(gpu, "lm_head", "T=1") == (None, "")
    shipped = tuning.shipped_path(gpu)
    assert shipped.name == "nvidia-rtx-pro-6000-96-gb.json"
    tuning.save(shipped, gpu, "lm_head", "T=1", {"block_o": 8})
    assert tuning.lookup(gpu, "lm_head", "T=1") == ({"block_o": 8}, "shipped")
    tuning.save(tmp_path / "own.json", gpu, "lm_head", "T=1", {"block_o": 2})
    assert tuning.lookup(gpu, "lm_head", "T=1") == ({"block_o": 2}, "tuned")
    assert tuning.lookup(gpu, "lm_head", "T=2") == (None, "")


@pytest.mark.parametrize(
    ("key", "wanted"),
    [
        pytest.param("B=1,D=8,T=1", 1, id="the-shape-itself"),
        pytest.param("B=2,D=8,T=1", 4, id="more-sequences-of-one-token"),
        pytest.param("B=1,D=8,T=3", 3, id="more-tokens"),
        pytest.param("B=2,D=8,T=3", 5, id="the-smallest-that-holds-both"),
        pytest.param("B=1,D=8,T=65", None, id="larger-than-all"),
        pytest.param("B=9,D=8,T=1", None, id="one-token-does-not-take-a-trees"),
        pytest.param("B=1,D=16,T=3", None, id="another-head-size"),
    ],
)
def test_a_shape_between_takes_the_next_larger_ones_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, wanted: int | None
) -> None:
    path = tmp_path / "own.json"
    monkeypatch.setenv(tuning.PATH_VARIABLE, str(path))
    for tuned, splits in (
        ("B=1,D=8,T=1", 1), ("B=4,D=8,T=1", 4), ("B=1,D=8,T=4", 3), ("B=4,D=8,T=4", 5),
        ("B=16,D=8,T=64", 7),
    ):  # fmt: skip
        tuning.save(path, "GPU", "qkv_attention", tuned, {"splits": splits})
    config, _ = tuning.lookup("GPU", "qkv_attention", key)
    assert config == (None if wanted is None else {"splits": wanted})


def test_the_shape_key_does_not_depend_on_order() -> None:
    assert tuning.shape_key({"T": 1, "H": 2}) == tuning.shape_key({"H": 2, "T": 1}) == "H=2,T=1"


def test_an_op_uses_a_forced_configuration_and_then_its_default_again() -> None:
    x, w = torch.empty(1, 64, device="meta"), torch.empty(48, 64, device="meta")
    config = {"vector": 1, "block_o": 2, "block_k": 64, "num_warps": 1}
    blocks = []
    for forced in (True, False):
        with recording() as launches:
            if forced:
                with tuning.forced("linear_add", config):
                    opset("triton").linear_add(x, w, None)
            else:
                opset("triton").linear_add(x, w, None)
        blocks.append(launches[0].meta["BLOCK_O"])
    assert blocks[0] == 2
    assert blocks[1] != 2


@pytest.mark.parametrize("text", ["0", "4x", "x4", "1x0", "a", "1x2x3"])
def test_a_bad_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected SEQUENCESxTOKENS"):
        tune.parse_size(text)


@pytest.mark.parametrize("size", [(1, 1), (1, 4), (16, 1), (1, 64), (2, 64)], ids=str)
def test_every_candidate_and_default_launches_on_meta_tensors(size: tuple[int, int]) -> None:
    """What the launcher reads of a configuration is there, for every configuration."""
    count = 0
    for case in layer_cases(replace(ODD, top_k=8), *size, 100):
        inputs = case.make(torch.device("meta"), torch.bfloat16)
        for op in case.tuned:
            for config in candidates_for(op, ODD, *size):
                first = moe_gate_up.default_config(2, 2, 2) if op == "moe_down" else None
                with recording() as launches, tuning.forced(op, config):
                    if first is None:
                        case.run(opset("triton"), inputs)
                    else:
                        with tuning.forced("moe_gate_up", first):
                            case.run(opset("triton"), inputs)
                assert launches
                count += 1
    assert count > 12


def test_defaults_fit_the_smallest_shared_memory() -> None:
    limit = min(SHARED_LIMIT_BYTES.values())
    for tokens in (1, 2, 16, 17, 64, 65, 4096):
        for element_bytes in (2, 4):
            for op, config in (
                ("norm_linear", linear.default_config(tokens, 5120, 2048, element_bytes)),
                ("norm_route", router.default_config(tokens, 2048, 128, element_bytes)),
                (
                    "moe_gate_up",
                    moe_gate_up.default_config(tokens, tokens * 8, element_bytes, 2048),
                ),
                (
                    "moe_down",
                    moe_down.default_config(tokens, tokens * 8, 768, element_bytes),
                ),
                (
                    "qkv_attention",
                    attention_kernel.default_config(
                        4, tokens * 8, 1024, 128, element_bytes, torch.device("cpu")
                    ),
                ),
            ):
                estimate = estimated_shared_bytes(op, config, element_bytes, 128, 128)
                assert estimate <= limit, (op, tokens, element_bytes, dict(config))


def test_configurations_that_exceed_an_architecture_are_excluded_there() -> None:
    large = {"vector": 0, "block_t": 64, "block_o": 256, "block_k": 128, "split_k": 1, "stages": 4,
             "num_warps": 8}  # fmt: skip
    small = dict(large, block_o=32, stages=2)
    kept = fitting("norm_linear", [large, small], SHARED_LIMIT_BYTES[120], 2, 128, 128)
    assert kept == [small]
    kept = fitting("norm_linear", [large, small], 400 * 1024, 2, 128, 128)
    assert kept == [large, small]


@pytest.mark.parametrize("capability", [90, 120])
def test_kernels_compile_and_need_no_more_shared_memory_than_estimated(
    tmp_path: Path, capability: int
) -> None:
    report = tmp_path / "report.jsonl"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.compile_all", "--fast", "--workers", "1", "--arch",
         str(capability), "--json", str(report), "--only", "linear_matrix_kernel",
         "down_grouped_kernel"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert {line["kernel"] for line in lines} == {"linear_matrix_kernel", "down_grouped_kernel"}
    for line in lines:
        assert 0 < line["shared_bytes"] <= line["estimate_bytes"], line


def test_every_kernel_is_among_what_is_compiled() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", "from kernels.compile_list import collect\n"
         "print(*{unit.kernel.__name__ for unit, _ in collect(False, True).values()})"],
        cwd=ROOT, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=True, timeout=280,
    )  # fmt: skip
    written = {
        name
        for path in (ROOT / "kernels").glob("*.py")
        for name in re.findall(r"@triton.jit\ndef (\w+_kernel)\(", path.read_text())
    }
    assert len(written) > 30
    assert written == set(done.stdout.split())
