"""Writes the target as a Hugging Face folder and checks it against ``transformers``."""

import json
import tempfile
from pathlib import Path

import torch
from tiny_moe import TinyMoe


def eager_copy(target: TinyMoe) -> TinyMoe:
    """A copy in evaluation mode, not compiled, with the weights rounded to bf16."""
    copy = TinyMoe(target.c).to(target.embed.weight.device)
    copy.load_state_dict(target.state_dict())
    copy.round_to_bf16()
    return copy.eval().requires_grad_(False)


def save_target(target: TinyMoe, folder: Path) -> None:
    """Write config.json, generation_config.json and bf16 model.safetensors into ``folder``."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    config = target.c.hf()
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.dtype = torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    # under the names that transformers used before 5.0 too: other loaders read those
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written["rope_theta"] = target.c.rope_theta
    written["num_experts"] = written["num_local_experts"] = target.c.num_experts
    path.write_text(json.dumps(written, indent=2) + "\n")
    GenerationConfig(
        bos_token_id=0, eos_token_id=0, pad_token_id=0, do_sample=False
    ).save_pretrained(folder)
    save_file(target.hf_state(), str(folder / "model.safetensors"), metadata={"format": "pt"})


@torch.no_grad()
def check_target(target: TinyMoe, folder: Path) -> dict[str, float | int]:
    """Save, load with ``AutoModelForCausalLM`` in fp32 and compare the logits.

    Raises ``ValueError`` when key names or shapes differ from what transformers itself saves, or
    the logits differ by more than fp32 rounding.
    """
    from safetensors import safe_open
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

    save_target(target, folder)

    def shapes(path: Path) -> dict[str, tuple[int, ...]]:
        with safe_open(str(path), "pt") as file:
            return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118

    with tempfile.TemporaryDirectory() as scratch:
        Qwen3MoeForCausalLM(target.c.hf()).save_pretrained(scratch)
        theirs = shapes(Path(scratch) / "model.safetensors")
    ours = shapes(folder / "model.safetensors")
    if ours != theirs:
        raise ValueError(
            f"checkpoint keys differ: {sorted(set(ours.items()) ^ set(theirs.items()))[:6]}"
        )
    oracle = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer(
        "import os\n\n\ndef walk(top, topdown=True):\n    ", return_tensors="pt"
    ).input_ids
    ids = torch.cat(
        [
            ids,
            torch.randint(
                target.c.vocab_size, ids.shape, generator=torch.Generator().manual_seed(1)
            ),
        ]
    )
    mine = target.to("cpu")
    own = mine.head(mine(ids)[0])
    expected = oracle(ids).logits
    error = float((own - expected).norm() / expected.norm())
    agree = float((own.argmax(-1) == expected.argmax(-1)).float().mean())
    target.to("cuda" if torch.cuda.is_available() else "cpu")
    if not error < 1e-4:
        raise ValueError(f"logits differ from transformers: relative error {error:.2e}")
    return {
        "relative_error": error,
        "argmax_agreement": agree,
        "num_tensors": len(ours),
        "num_parameters": sum(p.numel() for p in target.parameters()),
    }
