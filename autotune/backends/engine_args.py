"""What the engine backend resolves before it starts anything: device, dtype, sizes, prompts.

Kept free of the engine, so that bad input is refused before torch is loaded where possible.
"""

import hashlib
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StrictInt, ValidationError

from autotune.backends.base import BackendContext, argument_problems
from autotune.errors import UserError
from autotune.launch import launch_mapping
from autotune.prompts import PromptSet, load_prompts, load_tokenizer
from autotune.schemas import Count, Positive, Schema, Study
from model.spec import Knobs, Scalar

#: rows beyond prompt and output that a verify's tree may fill
CONTEXT_MARGIN = 8


class EngineArgs(Schema):
    """``backend.args`` of ``engine``."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    #: auto: float32 on CPU ranks, bfloat16 on GPUs
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    #: auto: reference on CPU ranks, triton on GPUs
    ops: Literal["auto", "reference", "triton"] = "auto"
    #: threads of one CPU rank; None: the engine's default
    threads: Count | None = None
    #: seconds after which a silent worker counts as hung
    timeout_s: Positive = 300.0
    #: tokens per slot; None: what the workload needs
    max_context: Count | None = None
    #: NCCL log per rank: "tuning" adds one line per all-reduce, which costs time without graphs
    nccl_log: Literal["auto", "init", "tuning"] = "auto"
    #: tokens of a warm-up request: enough cycles for caches, kernels and graphs to settle
    warmup_tokens: Count = 24
    #: first seed of sampled requests (temperature above 0)
    sampling_seed: Annotated[StrictInt, Field(ge=0)] = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """``EngineArgs`` with every ``auto`` decided."""

    args: EngineArgs
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16", "float16"]
    max_context: int
    #: slots of one start: the highest level; in 16 bit at least 2, to see a change of batch size
    max_concurrency: int


def resolve(context: BackendContext) -> Resolved:
    """Check and complete ``backend.args`` for this host.

    Raises ``UserError`` naming the key: an unknown argument, GPUs asked for where none is, a
    prompt longer than the model allows.
    """
    study = context.study
    try:
        args = EngineArgs.model_validate(study.backend.args)
    except ValidationError as error:
        raise argument_problems(error, EngineArgs) from None
    num_gpus = visible_gpus()
    if args.device == "cuda" and num_gpus == 0:
        raise UserError(
            "backend.args.device: cuda was asked for, but torch sees no GPU; write device: cpu "
            "for CPU ranks, or run on a GPU host (`autotune doctor` says what is wrong with one)"
        )
    device: Literal["cpu", "cuda"] = "cuda" if args.device != "cpu" and num_gpus else "cpu"
    if device == "cuda":
        largest_tp = max((int(tp) for tp in study.space.get("parallel.tp", (1,))), default=1)
        if largest_tp > num_gpus:
            raise UserError(
                f"space.parallel.tp: {largest_tp} needs {largest_tp} GPUs, torch sees {num_gpus}; "
                f"list sizes up to {num_gpus}"
            )
    dtype = args.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    levels = study.workload.concurrency
    return Resolved(
        args=args,
        device=device,
        dtype=dtype,
        max_context=_max_context(study, args),
        max_concurrency=max(*levels, 1 if dtype == "float32" else 2),
    )


def base_knobs(settings: Mapping[str, Scalar | None]) -> Knobs:
    """Plain decoding with a group's settings."""
    return Knobs.of({**settings, "speculation.method": "off"})


def group_mapping(
    study: Study, resolved: Resolved, settings: Mapping[str, Scalar | None]
) -> dict[str, Any]:
    """What starts the engine for a group: any speculation may be asked for per call."""
    mapping = launch_mapping(
        study,
        [(resolved.max_concurrency, base_knobs(settings))],
        device=resolved.device,
        dtype=resolved.dtype,
        max_context=resolved.max_context,
        timeout_s=float(resolved.args.timeout_s),
        threads=resolved.args.threads,
    )
    # plain knobs drop the graphs that plain decoding lacks; the workers need the group's
    mapping["cuda_graph"] = {
        name.removeprefix("cuda_graph."): bool(value)
        for name, value in settings.items()
        if name.startswith("cuda_graph.")
    }
    mapping["cuda_graph"]["prefill"] = mapping["cuda_graph"]["decode"]
    mapping["ops"] = resolved.args.ops
    return mapping


def logs_tuning(args: EngineArgs, settings: Mapping[str, Scalar | None]) -> bool:
    """Whether NCCL logs its choice per call.

    It does so at capture, not at replay; without graphs at every call, which would be measured.
    """
    graphed = bool(settings["cuda_graph.decode"]) and bool(settings["cuda_graph.verify"])
    return args.nccl_log == "tuning" or (args.nccl_log == "auto" and graphed)


def visible_gpus() -> int:
    """GPUs that torch can use here."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def study_prompts(study: Study, count: int) -> PromptSet:
    """The first ``count`` prompts of the study; random token ids for a target without tokenizer.

    Raises ``UserError`` naming what is missing.
    """
    spec = study.workload
    if study.target.path is not None:
        tokenizer = load_tokenizer(study.target.path)
        if spec.chat_template is not None:
            tokenizer = replace(tokenizer, chat_template=spec.chat_template)
        return load_prompts(spec.prompts, tokenizer, spec.input_len, count, study.seed)
    vocab = _vocabulary(study)
    draws = random.Random(study.seed)
    ids = tuple(
        tuple(draws.randrange(1, vocab) for _ in range(spec.input_len)) for _ in range(count)
    )
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    names = tuple(f"random/{index}" for index in range(count))
    return PromptSet(name="random", sha256=digest, token_ids=ids, prompt_names=names)


def prompts_per_level(study: Study, concurrency: int) -> int:
    """Requests of one repeat at a load level: as many as asked for, at least one per slot."""
    return max(study.workload.num_prompts or concurrency, concurrency)


def _max_context(study: Study, args: EngineArgs) -> int:
    spec = study.workload
    needed = spec.input_len + spec.output_len
    limit = _config(study).get("max_position_embeddings")
    if isinstance(limit, int) and needed > limit:
        raise UserError(
            f"workload: input_len {spec.input_len} + output_len {spec.output_len} = {needed} "
            f"tokens, but {_target_name(study)} allows {limit} (max_position_embeddings); "
            "shorten one of them"
        )
    if args.max_context is not None and args.max_context < needed:
        raise UserError(
            f"backend.args.max_context: {args.max_context} is below input_len + output_len = "
            f"{needed}; raise it or leave it out"
        )
    wanted = args.max_context or needed + CONTEXT_MARGIN
    return min(wanted, limit) if isinstance(limit, int) else wanted


def _vocabulary(study: Study) -> int:
    size = _config(study).get("vocab_size")
    if not isinstance(size, int):
        raise UserError(f"target: {_target_name(study)} names no vocab_size in its config.json")
    return size


def _config(study: Study) -> dict[str, Any]:
    """The target's config.json, a nested text model's values on top."""
    target = study.target
    folder = target.path or Path(__file__).parents[2] / "studies" / "shapes" / str(target.shape)
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
    except OSError:
        raise UserError(
            f"target: no config.json in {folder}; give a Hugging Face checkpoint folder, "
            "or a shape of studies/shapes"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"target: {file} is no JSON ({error.msg}, line {error.lineno})") from None
    return {**config, **config.get("text_config", {})}


def _target_name(study: Study) -> str:
    return str(study.target.path or study.target.shape)
