"""The equivalent SGLang and vLLM command lines of knobs.

Flags and their meaning were read in sglang 0.5.9 and 0.5.23 and vllm 0.16.0 and 0.33.0. What a
server cannot do is said in ``notes``, never dropped in silence: the speed was measured on the
engine, and a note is where the server may differ.
"""

import json
import shlex
from dataclasses import dataclass

from autotune.launch import nccl_environment
from model.spec import Knobs

SGLANG_VERSIONS = ("0.5.9", "0.5.23")
VLLM_VERSIONS = ("0.16.0", "0.33.0")

_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """What the command lines need besides the knobs; paths as the user gave them."""

    target: str
    draft: str | None
    dtype: str
    max_context: int
    max_concurrency: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """One command line; run it with ``environment`` added."""

    version: str
    environment: dict[str, str]
    arguments: tuple[str, ...]
    notes: tuple[str, ...]

    def mapping(self) -> dict[str, object]:
        """For the YAML: the command as one line a shell takes."""
        return {
            "version": self.version,
            "environment": dict(self.environment),
            "command": shlex.join(self.arguments),
            "notes": list(self.notes),
        }


def sglang_command(knobs: Knobs, where: ServerTarget, version: str) -> ServerCommand:
    """SGLang's command line; raises ``ValueError`` for a version whose flags are not known."""
    _known(version, SGLANG_VERSIONS, "SGLang")
    arguments = ["python", "-m", "sglang.launch_server", "--model-path", where.target]
    arguments += ["--tp-size", str(knobs.tp), "--dtype", _DTYPES[where.dtype]]
    arguments += ["--context-length", str(where.max_context)]
    arguments += ["--max-running-requests", str(where.max_concurrency)]
    notes: list[str] = []
    environment = nccl_environment(knobs)
    speculating = knobs.method == "eagle3"
    if speculating:
        if where.draft is None:
            raise ValueError("speculation.method eagle3 needs a draft model")
        arguments += ["--speculative-algorithm", "EAGLE3"]
        arguments += ["--speculative-draft-model-path", where.draft]
        # all three or none: with one missing both versions stop at a bare assertion, and with
        # none they choose a tree by model family
        arguments += ["--speculative-num-steps", str(knobs.steps)]
        arguments += ["--speculative-eagle-topk", str(knobs.topk)]
        arguments += ["--speculative-num-draft-tokens", str(knobs.draft_tokens)]
        if knobs.topk > 1:
            backends = "flashinfer or fa3" if version == "0.5.9" else "flashinfer, fa3 or triton"
            notes.append(
                f"topk above 1 with a page size above 1 needs attention backend {backends}"
            )
            if knobs.draft_tokens > knobs.steps * knobs.topk + 1:
                notes.append(
                    f"draft_tokens {knobs.draft_tokens} is above steps*topk+1 = "
                    f"{knobs.steps * knobs.topk + 1}: legal, but SGLang's own sweep script skips it"
                )
        if version == "0.5.9":
            notes.append(
                "0.5.9 turns the overlap scheduler off with speculation, so its baseline differs "
                "in that too"
            )
    graphed = knobs.graph_verify if speculating else knobs.graph_decode
    arguments += _sglang_graphs(graphed, where.max_concurrency, version)
    if speculating:
        notes += _sglang_graph_notes(knobs, graphed)
        if version == "0.5.23" and graphed and not knobs.graph_extend:
            environment["SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH"] = "1"
    if knobs.collectives_backend == "nccl":
        arguments.append("--disable-custom-all-reduce")
    elif knobs.collectives_backend in ("one_shot", "two_shot"):
        if version == "0.5.23":
            environment["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] = "1"
            notes.append(
                f"collectives {knobs.collectives_backend}: on a PCIe host SGLang's counterpart is "
                "the FlashInfer PCIe-IPC all-reduce (bf16, 2, 4 or 8 ranks)"
            )
        else:
            notes.append(
                f"collectives {knobs.collectives_backend}: SGLang 0.5.9 refuses its custom "
                "all-reduce on more than 2 GPUs without NVLink and falls back to NCCL"
            )
    elif knobs.collectives_backend == "gloo":
        arguments += ["--device", "cpu"]
        notes.append("measured on CPU ranks over gloo; SGLang's CPU path uses its own collectives")
    if knobs.numa_bind:
        notes.append("host.numa_bind: start each server under numactl --cpunodebind/--membind")
    return ServerCommand(
        version=version, environment=environment, arguments=tuple(arguments), notes=tuple(notes)
    )


def vllm_command(knobs: Knobs, where: ServerTarget, version: str) -> ServerCommand:
    """vLLM's command line; raises ``ValueError`` for a version whose flags are not known."""
    _known(version, VLLM_VERSIONS, "vLLM")
    arguments = ["vllm", "serve", where.target, "--tensor-parallel-size", str(knobs.tp)]
    arguments += ["--dtype", _DTYPES[where.dtype], "--max-model-len", str(where.max_context)]
    arguments += ["--max-num-seqs", str(where.max_concurrency)]
    notes: list[str] = []
    environment = nccl_environment(knobs)
    speculating = knobs.method == "eagle3"
    if speculating:
        if where.draft is None:
            raise ValueError("speculation.method eagle3 needs a draft model")
        speculation: dict[str, object] = {
            "method": "eagle3",
            "model": where.draft,
            "num_speculative_tokens": knobs.steps,
        }
        if knobs.topk > 1:
            trees = (
                "has only a static tree (speculative_token_tree)"
                if version == "0.16.0"
                else "has no tree speculation"
            )
            notes.append(
                f"vLLM {version} {trees} and gets a chain of {knobs.steps} instead of the measured "
                f"tree ({knobs.steps} steps, topk {knobs.topk}, {knobs.draft_tokens} tokens): "
                "expect a shorter accept length"
            )
        if knobs.graph_verify and not knobs.graph_draft:
            speculation["enforce_eager"] = True
        arguments += ["--speculative-config", json.dumps(speculation)]
    width = knobs.steps + 1 if speculating else 1
    if knobs.graph_verify if speculating else knobs.graph_decode:
        # sizes count tokens, not requests: a verify of r requests is r * (1 + steps) tokens
        sizes = [width * count for count in range(1, where.max_concurrency + 1)]
        config = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": sizes}
        arguments += ["--compilation-config", json.dumps(config)]
    elif knobs.collectives_backend != "gloo":
        arguments.append("--enforce-eager")
    if knobs.collectives_backend == "nccl":
        arguments.append("--disable-custom-all-reduce")
    elif knobs.collectives_backend in ("one_shot", "two_shot"):
        if version == "0.33.0":
            environment["VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC"] = "1"
            notes.append(
                f"collectives {knobs.collectives_backend}: on a PCIe host vLLM's counterpart is "
                "the FlashInfer PCIe-IPC all-reduce"
            )
        else:
            notes.append(
                f"collectives {knobs.collectives_backend}: vLLM {version} refuses its custom "
                "all-reduce on more than 2 GPUs without NVLink and falls back to NCCL"
            )
    elif knobs.collectives_backend == "gloo":
        notes.append("measured on CPU ranks over gloo; needs a CPU build of vLLM")
    if knobs.numa_bind and version == "0.33.0":
        arguments.append("--numa-bind")
    elif knobs.numa_bind:
        notes.append("host.numa_bind: start the server under numactl --cpunodebind/--membind")
    return ServerCommand(
        version=version, environment=environment, arguments=tuple(arguments), notes=tuple(notes)
    )


def _sglang_graphs(graphed: bool, max_concurrency: int, version: str) -> list[str]:
    """Graph flags; they were renamed between the versions, and the old names are refused."""
    if version == "0.5.9":
        if graphed:
            return ["--cuda-graph-max-bs", str(max_concurrency)]
        return ["--disable-cuda-graph"]
    if graphed:
        backend = ["--cuda-graph-backend-decode", "full"]
        return [*backend, "--cuda-graph-max-bs-decode", str(max_concurrency)]
    return ["--cuda-graph-backend-decode", "disabled"]


def _sglang_graph_notes(knobs: Knobs, graphed: bool) -> list[str]:
    if knobs.graph_draft != graphed:
        return [
            "SGLang captures the draft whenever it captures the verify; draft alone has no flag"
        ]
    return []


def _known(version: str, versions: tuple[str, ...], server: str) -> None:
    if version not in versions:
        raise ValueError(f"{server} {version}: flags are known for {', '.join(versions)}")
