"""From knobs to what starts a server: the engine's launch mapping and the NCCL environment.

The mapping has the keys of ``engine.config.LaunchConfig`` (``autotune`` does not import the
engine; the contract tests start it from an exported file).
"""

from collections.abc import Sequence
from typing import Any

from autotune.schemas import ModelRef, Study
from model.spec import Knobs

#: knobs whose change needs new workers; speculation changes per call
RESTART_KNOBS = (
    "parallel.tp",
    "collectives.backend",
    "nccl.algo",
    "nccl.proto",
    "nccl.min_channels",
    "nccl.max_channels",
    "nccl.buffsize",
    "nccl.nthreads",
    "nccl.p2p_level",
    "host.numa_bind",
    "cuda_graph.decode",
    "cuda_graph.draft",
    "cuda_graph.verify",
    "cuda_graph.extend",
)


def launch_mapping(
    study: Study,
    schedule: Sequence[tuple[int, Knobs]],
    *,
    device: str,
    dtype: str,
    max_context: int,
    timeout_s: float,
    threads: int | None = None,
) -> dict[str, Any]:
    """What starts the engine for ``study`` with one group of knobs.

    ``schedule`` holds (largest concurrency, knobs), ascending; their settings outside speculation
    must agree as far as one start can serve them: graphs are captured where any level asks for
    them. ``max_context`` in tokens. Raises ``ValueError`` naming a setting that does not agree.
    """
    levels = sorted(schedule, key=lambda level: level[0])
    _, first = levels[0]
    for _, knobs in levels[1:]:
        for name in RESTART_KNOBS:
            graph = name.startswith("cuda_graph.")
            if not graph and knobs.values()[name] != first.values()[name]:
                raise ValueError(
                    f"one start cannot serve {name} {first.values()[name]} and "
                    f"{knobs.values()[name]}; choose the levels from one group"
                )
    knobs_list = [knobs for _, knobs in levels]
    plain = [knobs for knobs in knobs_list if knobs.method == "off"]
    # a speculative level never decodes plainly: a plain one decides where there is one
    decode = any(knobs.graph_decode for knobs in plain or knobs_list)
    return {
        "target": model_mapping(study.target),
        "draft": None if study.draft is None else draft_mapping(study.draft),
        "tp": first.tp,
        "device": device,
        "dtype": dtype,
        "max_context": max_context,
        "max_concurrency": levels[-1][0],
        "collectives": {"backend": _or_none(first.collectives_backend)},
        "nccl": {
            "algo": _or_none(first.nccl_algo),
            "proto": _or_none(first.nccl_proto),
            "min_channels": first.nccl_min_channels,
            "max_channels": first.nccl_max_channels,
            "buffsize": first.nccl_buffsize_bytes,
            "nthreads": first.nccl_nthreads,
            "p2p_level": _or_none(first.nccl_p2p_level),
        },
        "cuda_graph": {
            "decode": decode,
            "draft": any(knobs.graph_draft for knobs in knobs_list),
            "verify": any(knobs.graph_verify for knobs in knobs_list),
            "extend": any(knobs.graph_extend for knobs in knobs_list),
            # no knob of its own: a host that captures decoding captures prompts too
            "prefill": decode,
        },
        "host": {"numa_bind": first.numa_bind} | ({} if threads is None else {"threads": threads}),
        "schedule": [
            {"max_concurrency": concurrency, "speculation": speculation_mapping(knobs)}
            for concurrency, knobs in levels
        ],
        "timeout_s": timeout_s,
        "seed": study.seed,
    }


def model_mapping(model: ModelRef) -> dict[str, Any]:
    """``{path: ...}`` or ``{shape: ..., weights: random, layers: ...}``."""
    values = model.model_dump(mode="json", exclude_none=True)
    return dict(values)


def draft_mapping(draft: ModelRef) -> dict[str, Any]:
    """``{path: ...}``, or ``{weights: random}``: a random head always fits its target."""
    return {"weights": "random"} if draft.path is None else {"path": str(draft.path)}


def speculation_mapping(knobs: Knobs) -> dict[str, Any]:
    """Method and tree of ``knobs``; with speculation off only the method."""
    if knobs.method == "off":
        return {"method": "off"}
    return {
        "method": knobs.method,
        "steps": knobs.steps,
        "topk": knobs.topk,
        "draft_tokens": knobs.draft_tokens,
    }


def nccl_environment(knobs: Knobs) -> dict[str, str]:
    """NCCL variables that these knobs set; empty when NCCL is left to itself or carries nothing.

    Names and values as NCCL reads them: algorithms are matched without regard to case, P2P levels
    with it, an unknown level is silently ignored.
    """
    settings: dict[str, str | int | None] = {
        "NCCL_ALGO": _unless_auto(knobs.nccl_algo, {"ring": "Ring", "tree": "Tree"}),
        "NCCL_PROTO": _unless_auto(knobs.nccl_proto, {}),
        "NCCL_MIN_NCHANNELS": knobs.nccl_min_channels,
        "NCCL_MAX_NCHANNELS": knobs.nccl_max_channels,
        "NCCL_BUFFSIZE": knobs.nccl_buffsize_bytes,
        "NCCL_NTHREADS": knobs.nccl_nthreads,
        "NCCL_P2P_LEVEL": _unless_auto(knobs.nccl_p2p_level, {}),
    }
    return {name: str(value) for name, value in settings.items() if value is not None}


def _or_none(value: str) -> str | None:
    return None if value == "auto" else value


def _unless_auto(value: str, spelling: dict[str, str]) -> str | None:
    return None if value == "auto" else spelling.get(value, value)
