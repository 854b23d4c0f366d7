"""vLLM on this GPU, measured as ``bench/engine.py`` measures our engine; a script of its own.

    PYTHONPATH=<site with vllm> python bench/vllm_peer.py --out ROWS.jsonl --folder DIR
        [--layers 8] [--batches 1 4 16 64] [--eagle] [--repeats 3] [--busy 1 4]

Nothing of this repository is imported, so that vLLM's packages are the only ones in the process.
The shape is Qwen3-30B-A3B's with dummy weights (a config.json without weights is written to DIR);
``--eagle`` adds an EAGLE-3 head with random weights and k = 3 at an accept length of exactly 3.
Wall is (generate 257 tokens - generate 1) / steps with the prompt's prefix cached in both, so that
no prefill is in it. Busy is the union of kernel times over the steps of a profiled generation. With
``--hold PATH`` the engine starts and warms up, makes PATH.ready, and measures once PATH.go exists:
starts take longer than measuring, and several may overlap.
"""

import argparse
import gzip
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

PROMPT_LEN, LONG, SHORT = 896, 257, 1
VOCAB, HIDDEN, DRAFT_VOCAB, WIDTH, HEADS, KV_HEADS, HEAD_DIM = (
    151_936,
    2048,
    32_000,
    6144,
    32,
    4,
    128,
)
#: decode steps in a profiled generation
PROFILED = 40
MAX_LEN = 2048
HOLD_S = 600.0


def cache_bytes(layers: int, sequences: int) -> int:
    """Room for the longest sequences, and a gibibyte more for whole blocks and the head's layer."""
    token = 2 * KV_HEADS * HEAD_DIM * 2 * (layers + 1)
    return sequences * MAX_LEN * token + (1 << 30)


def common_config() -> dict[str, Any]:
    """What target and head share."""
    return {
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": WIDTH,
        "vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def write_target(folder: Path, layers: int) -> Path:
    """A config without weights: they are dummies."""
    target = folder / f"target-{layers}"
    target.mkdir(parents=True, exist_ok=True)
    config = common_config() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }
    (target / "config.json").write_text(json.dumps(config))
    return target


def write_head(folder: Path, layers: int) -> Path:
    """A head with weights: dummy ones would be taken for another kind of head."""
    import torch
    from safetensors.torch import save_file

    head = folder / f"eagle3-{layers}"
    head.mkdir(parents=True, exist_ok=True)
    config = common_config() | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "mlp_bias": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, layers // 2, layers - 3]},
    }
    (head / "config.json").write_text(json.dumps(config))
    draws = torch.Generator().manual_seed(11)
    query, pair = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    matrices = {
        "fc": (HIDDEN, 3 * HIDDEN),
        "lm_head": (DRAFT_VOCAB, HIDDEN),
        "midlayer.self_attn.q_proj": (query, 2 * HIDDEN),
        "midlayer.self_attn.k_proj": (pair, 2 * HIDDEN),
        "midlayer.self_attn.v_proj": (pair, 2 * HIDDEN),
        "midlayer.self_attn.o_proj": (HIDDEN, query),
        "midlayer.mlp.gate_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.up_proj": (WIDTH, HIDDEN),
        "midlayer.mlp.down_proj": (HIDDEN, WIDTH),
    }
    tensors = {
        f"{name}.weight": torch.empty(shape).normal_(0.0, 0.02, generator=draws).bfloat16()
        for name, shape in matrices.items()
    }
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm")
    for name in (*norms, "midlayer.post_attention_layernorm"):
        tensors[f"{name}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    chosen = torch.arange(DRAFT_VOCAB) * (VOCAB // DRAFT_VOCAB)
    tensors["d2t"] = chosen - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
    tensors["t2d"][chosen] = True
    save_file(tensors, head / "model.safetensors")
    return head


class Peer:
    """One vLLM engine in this process, and its rows."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self.args = args
        folder = args.folder
        options: dict[str, Any] = {}
        if args.eagle:
            options["speculative_config"] = {
                "method": "eagle3",
                "model": str(write_head(folder, args.layers)),
                "num_speculative_tokens": 3,
                "draft_load_config": {"load_format": "auto"},
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
            }
        self.traces = folder / f"traces-{args.layers}{'-eagle' if args.eagle else ''}"
        if args.busy:
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": str(self.traces),
                "torch_profiler_with_stack": False,
            }
        started_s = time.perf_counter()
        self.llm: Any = LLM(
            model=str(write_target(folder, args.layers)),
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=MAX_LEN,
            max_num_seqs=max(args.batches),
            # others start on this GPU meanwhile: nothing may be inferred from its free memory
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=cache_bytes(args.layers, max(args.batches)),
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            **options,
        )
        self.random = random.Random(5)
        self.asks = {batch: self.prompts(batch) for batch in args.batches}
        # the prefix cache, graphs, and kernels that are compiled at their first use
        for prompts in self.asks.values():
            for new in (SHORT, LONG):
                self.generate(prompts, new)
        self.start_s = time.perf_counter() - started_s

    def prompts(self, batch: int, length: int = PROMPT_LEN) -> list[dict[str, list[int]]]:
        """Distinct random token ids."""
        return [
            {"prompt_token_ids": [self.random.randrange(1, VOCAB) for _ in range(length)]}
            for _ in range(batch)
        ]

    def generate(self, prompts: list[dict[str, list[int]]], new: int) -> tuple[float, list[Any]]:
        """Seconds, and the outputs."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start_s = time.perf_counter()
        out = self.llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start_s, out

    def num_drafts(self) -> float:
        """Verifies of single sequences so far."""
        return sum(
            float(getattr(metric, "value", 0.0))
            for metric in self.llm.get_metrics()
            if metric.name.removesuffix("_total").endswith("spec_decode_num_drafts")
        )

    def row(self, batch: int) -> dict[str, Any]:
        """Wall of a step at one batch size, every repeat."""
        prompts = self.asks[batch]
        self.generate(prompts, SHORT)
        walls, steps, out = [], float(LONG - 1), []
        for _ in range(self.args.repeats):
            short_s, _ = self.generate(prompts, SHORT)
            before = self.num_drafts() if self.args.eagle else 0.0
            long_s, out = self.generate(prompts, LONG)
            if self.args.eagle:
                steps = (self.num_drafts() - before) / batch
            walls.append((long_s - short_s) / steps * 1e3)
        tokens = [list(o.outputs[0].token_ids) for o in out]
        length = min(map(len, tokens))
        spread = sum(len({row[i] for row in tokens}) for i in range(length)) / length
        return {
            "batch": batch,
            "wall_ms": statistics.median(walls),
            "wall_low_ms": min(walls),
            "wall_high_ms": max(walls),
            "steps": steps,
            "distinct_tokens": spread,
            "accept_length": (LONG - 1) / steps if self.args.eagle else None,
        }

    def busy(self, batch: int) -> dict[str, Any]:
        """GPU time of a step from a profiled generation."""
        prompts = self.asks[batch]
        self.generate(prompts, SHORT)
        self.llm.start_profile()
        self.generate(prompts, PROFILED + 1)
        self.llm.stop_profile()
        # and one more, which takes the part of the prompt that no whole cache block holds
        steps = 1 + (PROFILED / 3 if self.args.eagle else PROFILED)
        spans = sorted(kernel_spans(self.traces))
        return {"batch": batch, "busy_ms": union_us(spans) / steps / 1e3,
                "kernels_per_step": len(spans) / steps}  # fmt: skip


def kernel_spans(folder: Path) -> list[tuple[float, float]]:
    """Start and end (us) of everything on the GPU in the newest trace that has such events."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        newest_first = sorted(folder.rglob("*.json*"), key=lambda p: -p.stat().st_mtime)
        for path in newest_first:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            spans = [
                (event["ts"], event["ts"] + event["dur"])
                for event in json.loads(text)["traceEvents"]
                if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
                and event.get("ph") == "X"
            ]
            if spans:
                return spans
        time.sleep(0.5)
    raise RuntimeError(f"no trace with kernels in {folder}")


def union_us(spans: list[tuple[float, float]]) -> float:
    """Time covered by spans sorted by their start."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def hold(path: Path) -> None:
    """Say that the engine is warm, and wait for the word to measure."""
    path.with_suffix(".ready").touch()
    deadline_s = time.monotonic() + HOLD_S
    while not path.with_suffix(".go").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path.with_suffix('.go')} did not come within {HOLD_S:.0f} s")
        time.sleep(0.1)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--busy", type=int, nargs="*", default=[])
    parser.add_argument("--eagle", action="store_true")
    parser.add_argument("--hold", type=Path)
    args = parser.parse_args()
    began_s = time.perf_counter()
    import vllm

    def emit(row: str, **values: Any) -> None:
        with args.out.open("a") as file:
            file.write(json.dumps({"row": row, **values}) + "\n")

    import_s = time.perf_counter() - began_s
    peer = Peer(args)
    emit("vllm start", version=vllm.__version__, import_s=import_s, start_s=peer.start_s)
    if args.hold is not None:
        hold(args.hold)
    for batch in args.batches:
        emit("vllm", **peer.row(batch))
    for batch in args.busy:
        emit("vllm busy", **peer.busy(batch))


if __name__ == "__main__":
    main()
