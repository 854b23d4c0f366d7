"""What the stages of a training run share: sizes, clock and log, data, optimiser loop."""

import argparse
import json
import math
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from tiny_moe import TinyConfig

TARGET_FOLDER, HEAD_FOLDER = "tiny-moe", "tiny-moe-eagle3"
#: what a run measured, beside the folders
RESULTS = "training-results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Batch and data sizes of a run; ``SMOKE`` is for testing the script on a CPU."""

    config: TinyConfig = field(default_factory=TinyConfig)
    draft_vocab_size: int = 1536
    max_files: int | None = None
    batch_tokens: int = 49152
    #: sequence lengths of the target's first 85 % of time, and of the rest
    sequences: tuple[int, int] = (512, 2048)
    text_share: float = 0.15
    target_rate: float = 2e-3
    #: (prompt tokens, new tokens, sequences a batch, batches, temperature)
    continuations: tuple[tuple[int, int, int, int, float], ...] = (
        (64, 192, 2048, 4, 0.0),
        (128, 192, 2048, 4, 0.0),
        (256, 192, 2048, 2, 0.0),
        (96, 192, 2048, 5, 1.0),
        (832, 192, 1024, 1, 0.0),
    )
    head_batch_tokens: int = 16384
    head_rate: float = 1e-3
    #: corpus windows this long, so that the head has seen far positions
    head_long_sequence: int = 2048
    unroll_steps: int = 5
    unroll_decay: float = 0.8
    measured_prompts: int = 256
    measured_input_len: int = 96
    measured_new: int = 64


SMOKE = Sizes(
    config=TinyConfig(vocab_size=1024, hidden_size=64, num_layers=6, head_dim=16, expert_width=16),
    draft_vocab_size=768,
    max_files=40,
    batch_tokens=2048,
    sequences=(128, 256),
    continuations=((16, 32, 16, 2, 0.0), (24, 32, 16, 1, 1.0)),
    head_batch_tokens=1024,
    head_long_sequence=128,
    measured_prompts=8,
    measured_new=32,
)


class Run:
    """One training run: its sizes, clock, data and log."""

    def __init__(self, args: argparse.Namespace, sizes: Sizes) -> None:
        self.args, self.sizes = args, sizes
        self.began = time.monotonic()
        self.device = torch.device(args.device)
        self.results: dict[str, object] = {"seed": args.seed}
        self.log_lines: list[str] = []
        args.models.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def log(self, text: str) -> None:
        self.log_lines.append(f"[{self.seconds:6.1f} s] {text}")
        print(self.log_lines[-1], flush=True)

    def pack(self, folder: str) -> None:
        """Put one result folder into --pack as a tar.gz, beside the log and the results."""
        if self.args.pack is None:
            return
        self.args.pack.mkdir(parents=True, exist_ok=True)
        with tarfile.open(self.args.pack / f"{folder}.tar.gz", "w:gz") as tar:
            tar.add(self.args.models / folder, arcname=folder)
        (self.args.pack / "train.log").write_text("\n".join(self.log_lines) + "\n")
        (self.args.pack / RESULTS).write_text(json.dumps(self.results, indent=1))

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """Token streams on the device; the last 1.5 % of each validates."""

    code: torch.Tensor
    text: torch.Tensor
    valid: torch.Tensor

    def windows(self, count: int, length: int, text_share: float) -> torch.Tensor:
        """Random windows [count, length] of the training streams."""
        num_text = round(count * text_share)
        parts = []
        for stream, n in ((self.text, num_text), (self.code, count - num_text)):
            start = torch.randint(len(stream) - length, (n, 1), device=stream.device)
            parts.append(stream[start + torch.arange(length, device=stream.device)])
        return torch.cat(parts).long()


def optimizer_for(model: torch.nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() == 2], "weight_decay": decay},
        {"params": [p for p in trained if p.dim() != 2], "weight_decay": 0.0},
    ]
    fused = trained[0].is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=fused)


def optimise(
    run: Run,
    model: torch.nn.Module,
    rate: float,
    decay: float,
    until: float,
    loss_of: Callable[[float], tuple[torch.Tensor, torch.Tensor]],
    report: Callable[[float, torch.Tensor], str],
    every_s: float,
) -> int:
    """Train until the run's clock shows ``until``: 3 % warm-up, then a cosine down to 2 %.

    ``loss_of(progress)`` gives the loss and a tensor that ``report`` turns into a progress line
    every ``every_s`` seconds. Returns the number of steps.
    """
    optimizer = optimizer_for(model, rate, decay)
    start, next_report, step = run.seconds, run.seconds + every_s, 0
    while (progress := (run.seconds - start) / max(1e-9, until - start)) < 1:
        shape = min(1.0, progress / 0.03, (step + 1) / 20) * (
            0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = rate * shape
        with run.autocast():
            loss, detail = loss_of(progress)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0 and run.device.type == "cuda":
            # keep the clock honest: the host may run far ahead of the device
            torch.cuda.synchronize()
        if run.seconds >= next_report:
            run.log(f"{100 * progress:5.1f} % step {step} {report(progress, detail)}")
            next_report = run.seconds + every_s
    return step
