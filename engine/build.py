"""From a launch config to one rank's models.

``resolve`` reads sizes only (no torch, no weights): the parent uses it to refuse a bad config
before any worker starts. ``build`` loads this rank's weights.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import SCRATCH_ROWS, LaunchConfig
from engine.errors import invalid
from engine.shapes import (
    DraftShape,
    TargetShape,
    draft_shape,
    named_target_shape,
    random_draft_shape,
    target_shape,
)

if TYPE_CHECKING:
    import torch

    from engine.collectives import Group
    from engine.draft import DraftModel
    from engine.executor import Executor
    from engine.resident import Resident


@dataclass(frozen=True, slots=True)
class Shapes:
    """Sizes of what a config names."""

    target: TargetShape
    draft: DraftShape | None


def resolve(config: LaunchConfig) -> Shapes:
    """Read the sizes and check them against the config; raises ``EngineError`` (invalid)."""
    spec = config.target
    if spec.path is not None:
        folder = Path(spec.path)
        if not folder.is_dir():
            raise invalid(f"target.path {spec.path!r}: no such folder")
        target = target_shape(folder / "config.json")
    else:
        assert spec.shape is not None
        target = named_target_shape(spec.shape, spec.layers)
    target.check_tp(config.tp)
    if config.max_context > target.max_position:
        raise invalid(
            f"max_context {config.max_context} is above the target's max_position_embeddings "
            f"{target.max_position}"
        )
    window = target.sliding_window
    if window is not None and config.max_context > window:
        raise invalid(
            f"max_context {config.max_context} is above the target's sliding_window {window}: "
            "attention that forgets is not supported, up to the window it is the same"
        )
    if config.op_set == "triton" and config.device == "cpu" and not _interprets():
        raise invalid(
            "ops 'triton' on device 'cpu': kernels need a GPU (or TRITON_INTERPRET=1, very slow); "
            "use ops: auto"
        )
    if config.tp > target.vocab:
        raise invalid(f"tp {config.tp} is above the target's vocab_size {target.vocab}")
    return Shapes(target, _resolve_draft(config, target))


def _interprets() -> bool:
    """Whether Triton would run kernels on a CPU, one program after the other."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _resolve_draft(config: LaunchConfig, target: TargetShape) -> DraftShape | None:
    if config.draft is None:
        return None
    if config.draft.shape is not None:
        shape = draft_shape(_config_json("draft.shape", config.draft.shape), target)
    elif config.draft.path is None:
        shape = random_draft_shape(target, config.draft.vocab)
    else:
        folder = Path(config.draft.path)
        if not folder.is_dir():
            raise invalid(f"draft.path {config.draft.path!r}: no such folder")
        shape = draft_shape(folder / "config.json", target)
    widest = max((e.speculation.topk for e in config.schedule), default=0)
    if widest > shape.draft_vocab:
        raise invalid(f"topk {widest} is above the draft's vocabulary of {shape.draft_vocab}")
    return shape


def _config_json(key: str, name: str) -> Path:
    found = next((p for p in (Path(name), Path(name) / "config.json") if p.is_file()), None)
    if found is None:
        raise invalid(f"{key} {name!r}: neither a config.json nor a folder with one")
    return found


def build(
    config: LaunchConfig,
    shapes: Shapes,
    group: "Group",
    device: "torch.device",
    progress: Callable[[], None] = lambda: None,
) -> tuple["Executor", "DraftModel | None"]:
    """Load this rank's share; the head goes to rank 0 only."""
    import torch

    from engine.checkpoint import Checkpoint
    from engine.executor import Executor
    from engine.target import TargetModel
    from engine.weights import (
        RandomSource,
        Rank,
        check_target,
        load_target,
        target_scale,
        target_tensor_shapes,
    )
    from kernels.opset import opset

    dtype: torch.dtype = getattr(torch, config.dtype)
    ops = opset(config.op_set)
    source: Checkpoint | RandomSource
    if config.target.path is not None:
        source = Checkpoint(Path(config.target.path))
        check_target(source, shapes.target, Rank(group.rank, group.tp))
    else:
        names = target_tensor_shapes(shapes.target)
        scale = target_scale(shapes.target.layers)
        source = RandomSource(names, config.seed, device, dtype=dtype, scale=scale)
    weights = load_target(
        source,
        shapes.target,
        Rank(group.rank, group.tp),
        dtype=dtype,
        device=device,
        progress=progress,
    )
    leads = group.rank == 0
    model = TargetModel(
        shapes.target,
        weights,
        group,
        ops,
        # one slot more than requests can have: padding rows of a batch live there
        slots=config.max_concurrency + 1,
        rows=config.max_context + SCRATCH_ROWS,
        capture_points=shapes.draft.capture_points if leads and shapes.draft else (),
    )
    head = _build_draft(config, shapes.draft, model, device) if leads and shapes.draft else None
    return Executor(model, group, device), head


def resident(
    executor: "Executor", draft_model: "DraftModel | None", config: LaunchConfig
) -> "Resident":
    """Device-resident cycles over a built model."""
    from engine.cycle import Seeds
    from engine.resident import Resident

    slots = config.max_concurrency
    return Resident(
        executor.model,
        draft_model,
        None if draft_model is None else Seeds(draft_model, slots + 1),
        config.cuda_graph,
        slots=slots,
        seed=config.seed,
    )


def _build_draft(
    config: LaunchConfig, shape: DraftShape, model: object, device: "torch.device"
) -> "DraftModel":
    from engine.draft import DraftModel
    from engine.draft_weights import load_draft, random_draft
    from engine.target import TargetModel

    assert isinstance(model, TargetModel)
    assert config.draft is not None
    embed_VH = model.weights.embed_VH
    dtype = embed_VH.dtype
    if config.draft.path is not None:
        folder = Path(config.draft.path)
        weights = load_draft(folder, shape, embed_VH, dtype=dtype, device=device)
    else:
        weights = random_draft(shape, embed_VH, config.seed + 1, dtype=dtype, device=device)
    rows = config.max_context + SCRATCH_ROWS
    return DraftModel(shape, weights, model.ops, slots=config.max_concurrency + 1, rows=rows)
