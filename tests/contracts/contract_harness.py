"""One way to build every backend for the contract tests, with a tiny study for each."""

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from autotune.backends.base import Backend, BackendContext
from autotune.backends.recording import Recorded, Recording, write_recording
from autotune.backends.registry import create_backend
from autotune.records import Measurement
from autotune.schemas import Study
from model.acceptance import AcceptanceModel
from model.calibration import default_calibration
from model.machine import load_machine
from model.predictor import Predictor
from model.shapes import DraftShape, ModelShape
from model.spec import Knobs, Scalar, Workload

ROOT = Path(__file__).parents[2]
VOCAB = 257


@dataclass(frozen=True)
class Harness:
    """A backend with knobs of two groups, and a way to make it fail."""

    backend: Backend
    workload: Workload
    plain: Knobs
    chain: Knobs
    tree: Knobs
    #: knobs that need another group than the others; equal to ``plain`` where there is only one
    other: Knobs
    #: makes the next measurement of ``chain`` in an open group fail; the kinds it may have
    provoke: Callable[[], tuple[str, ...]]


def knobs(tp: int, collectives: str, **speculation: Scalar) -> Knobs:
    """Knobs from short names of speculation settings."""
    values: dict[str, Scalar | None] = {
        f"speculation.{name}": value for name, value in speculation.items()
    }
    return Knobs.of({**values, "parallel.tp": tp, "collectives.backend": collectives})


def workload_of(study: Study, concurrency: int = 2) -> Workload:
    """The study's workload at one level."""
    spec = study.workload
    return Workload(
        prompts=spec.prompts,
        prompts_sha256="contract",
        chat_template=None,
        input_len=spec.input_len,
        output_len=spec.output_len,
        context=spec.input_len + spec.output_len // 2,
        temperature=float(spec.temperature),
        ignore_eos=spec.ignore_eos,
        seed=study.seed,
        concurrency=concurrency,
    )


def study_of(
    kind: str,
    args: dict[str, object],
    target: Path | None,
    space: dict[str, object] | None = None,
    **workload: object,
) -> Study:
    """A study of two load levels on a tiny model."""
    shape = {"shape": "qwen3-30b-a3b", "weights": "random"}
    return Study.model_validate(
        {
            "name": f"contract-{kind}",
            "target": shape if target is None else {"path": str(target)},
            "draft": {"shape": "eagle3", "weights": "random"},
            "workload": {
                "prompts": "builtin:code",
                "input_len": 24,
                "output_len": 12,
                "concurrency": [1, 2],
                **workload,
            },
            "backend": {"kind": kind, "args": args},
            "space": {"speculation.method": ["off"], "parallel.tp": [1, 2]} | (space or {}),
            "budget": {"measured_trials": 2},
            "measure": {"warmup": 1},
        }
    )


def context_of(study: Study, tmp_path: Path, predictor: Predictor | None = None) -> BackendContext:
    """A context below ``tmp_path``."""
    return BackendContext(
        study=study,
        study_dir=tmp_path,
        machine=None if predictor is None else predictor.machine,
        predictor=predictor,
        log_dir=tmp_path / "logs",
    )


def predictor_of(machine: str = "8x-rtx-pro-6000-switches") -> Predictor:
    """The model of a 30B MoE on a machine file of the repository."""
    host = load_machine(ROOT / "studies" / "machines" / f"{machine}.yaml")
    target = ModelShape.load(ROOT / "studies" / "shapes" / "qwen3-30b-a3b")
    return Predictor(
        target,
        DraftShape.standard(target),
        host,
        default_calibration(host),
        AcceptanceModel.prior(),
    )


def sim_harness(tmp_path: Path, **args: object) -> Harness:
    """The simulator; provoking a failure turns its crash rate to 1."""
    study = study_of("sim", args, None, output_len=64)
    backend = create_backend("sim", context_of(study, tmp_path, predictor_of()))

    def provoke() -> tuple[str, ...]:
        held = backend._args  # type: ignore[attr-defined]
        rates = held.failures.model_copy(update={"crash": 1.0})
        backend._args = held.model_copy(update={"failures": rates})  # type: ignore[attr-defined]
        return ("crash",)

    return Harness(
        backend=backend,
        workload=workload_of(study),
        plain=knobs(2, "nccl"),
        chain=knobs(2, "nccl", method="eagle3", steps=3, topk=1),
        tree=knobs(2, "nccl", method="eagle3", steps=3, topk=2, draft_tokens=6),
        other=knobs(4, "nccl"),
        provoke=provoke,
    )


def replay_harness(tmp_path: Path) -> Harness:
    """A recording of the simulator; a failure is a repeat that was recorded as one."""
    source = sim_harness(tmp_path)
    path = tmp_path / "recorded.jsonl"
    repeats = [
        Recorded(each, source.workload, measured)
        for each in (source.plain, source.chain, source.tree)
        for measured in measure_some(source.backend, each, source.workload, 3)
    ]
    write_recording(path, Recording(tuple(repeats), source.backend.provenance()))
    study = study_of("replay", {"path": path.name}, None, output_len=64)
    backend = create_backend("replay", context_of(study, tmp_path))

    def provoke() -> tuple[str, ...]:
        backend._by_load.clear()  # type: ignore[attr-defined]
        return ("invalid",)

    return dataclasses.replace(source, backend=backend, other=source.plain, provoke=provoke)


def measure_some(
    backend: Backend, each: Knobs, workload: Workload, count: int
) -> list[Measurement]:
    """Repeats of one knobs in a group of its own."""
    backend.open(backend.group(each))
    measured = [backend.measure(each, workload, repeat) for repeat in range(count)]
    backend.close()
    return measured


def tiny_checkpoint(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3-MoE of a few hundred kB with a byte-level tokenizer, in Hugging Face form.

    Written by hand: importing transformers takes longer than all tests that need the folder.
    """
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    draws = torch.Generator().manual_seed(seed)
    hidden, layers, heads, kv_heads, head_dim, experts, wide = 64, 4, 4, 2, 16, 4, 32

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws) * 0.2

    weights = {
        "model.embed_tokens.weight": random(VOCAB, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": random(VOCAB, hidden),
    }
    for layer in range(layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(hidden),
            f"{name}.self_attn.q_proj.weight": random(heads * head_dim, hidden),
            f"{name}.self_attn.k_proj.weight": random(kv_heads * head_dim, hidden),
            f"{name}.self_attn.v_proj.weight": random(kv_heads * head_dim, hidden),
            f"{name}.self_attn.o_proj.weight": random(hidden, heads * head_dim),
            f"{name}.self_attn.q_norm.weight": torch.ones(head_dim),
            f"{name}.self_attn.k_norm.weight": torch.ones(head_dim),
            f"{name}.mlp.gate.weight": random(experts, hidden),
        }
        for expert in range(experts):
            place = f"{name}.mlp.experts.{expert}"
            weights[f"{place}.gate_proj.weight"] = random(wide, hidden)
            weights[f"{place}.up_proj.weight"] = random(wide, hidden)
            weights[f"{place}.down_proj.weight"] = random(hidden, wide)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": 64,
        "moe_intermediate_size": wide,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


def engine_harness(tmp_path: Path, checkpoint: Path, device: str = "cpu") -> Harness:
    """The real engine on a tiny random checkpoint; provoking a failure kills one worker.

    fp32 everywhere, so that output must be equal; one rank where there is one GPU.
    """
    from autotune.backends.engine_args import visible_gpus

    tp = 2 if device == "cpu" else min(visible_gpus(), 2)
    args: dict[str, object] = {"device": device, "dtype": "float32", "timeout_s": 200}
    space: dict[str, object] = {"parallel.tp": [1, tp] if tp > 1 else [1]}
    study = study_of("engine", args, checkpoint, space)
    backend = create_backend("engine", context_of(study, tmp_path))
    carrier = "gloo" if device == "cpu" else "nccl"

    def provoke() -> tuple[str, ...]:
        worker = backend.provenance().ranks[-1]
        os.kill(worker.pid, signal.SIGKILL)
        return ("crash",)

    return Harness(
        backend=backend,
        workload=workload_of(study),
        plain=knobs(tp, carrier),
        chain=knobs(tp, carrier, method="eagle3", steps=2, topk=1),
        tree=knobs(tp, carrier, method="eagle3", steps=2, topk=2, draft_tokens=5),
        other=Knobs.of({**knobs(1, carrier).values(), "host.numa_bind": True}),
        provoke=provoke,
    )
