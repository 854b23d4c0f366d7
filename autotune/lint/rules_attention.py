"""Attention backends: which kernel a verify really runs, and what each can do with a tree.

Source: sglang 0.5.9 to 0.5.23 (server_args.py, speculative_hook.py, triton_backend.py), read.
"""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup

_MLA_ONLY = ("trtllm_mla", "flashmla", "cutlass_mla", "cutedsl_mla")
#: backends that a tree (topk > 1) with pages of more than one token may use, by version
_PAGED_TREE = {"0.5.9": ("flashinfer", "fa3"), "": ("flashinfer", "fa3", "triton")}
_NO_GRAPH = ("torch_native", "flex_attention")
#: page sizes that a backend forces
_FORCED_PAGES = {"flashmla": 64, "cutlass_mla": 128, "trtllm_mla": 64, "trtllm_mha": 64}


def _backend(setup: Setup) -> str | None:
    """The target's backend in decoding as named; None where SGLang picks it."""
    command = setup.command
    return command.text("--decode-attention-backend") or command.text("--attention-backend") or None


def default_backend(setup: Setup) -> str | None:
    """What SGLang picks by GPU and architecture; None where that is not known."""
    if setup.cc is None or setup.mla is None:
        return None
    if setup.mla and setup.before("0.4.5"):
        return "triton"
    if setup.mla:
        return "fa3" if setup.cc == 90 else "flashinfer" if 100 <= setup.cc < 120 else "triton"
    tree = setup.speculation is not None and (setup.speculation.topk or 1) > 1
    if setup.cc == 90 and not tree:
        return "fa3"
    return "trtllm_mha" if 100 <= setup.cc < 120 and not tree else "flashinfer"


@rule(
    "verify-without-split-kv",
    "sgl-project/sglang PR #20604 (SM120), #27382, #4360; servers.md 0.6",
    "sglang",
)
def verify_through_extend_kernel(setup: Setup) -> Iterator[Hit]:
    """Triton's verify runs the extend kernel, which walks the prefix serially.

    The split-KV verify kernel of 0.5.15 and newer is switched on for AMD gfx95 only.
    """
    spec, command = setup.speculation, setup.command
    if spec is None or spec.algorithm not in ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM"):
        return
    mode = command.text("--speculative-attention-mode") or "prefill"
    named = command.text("--attention-backend") or None
    phase = command.text(f"--{mode}-attention-backend") or None
    backend = phase or named
    picked = ""
    if backend is None:
        backend = default_backend(setup)
        picked = f", SGLang's default here (sm_{setup.cc})"
    if backend != "triton":
        return
    yield warning(
        f"attention backend triton, speculative attention mode {mode}",
        f"the verify of {setup.verify_tokens} tokens runs Triton's extend kernel{picked}: it has "
        "no split-KV, one block walks the whole context (measured elsewhere: 680 GB/s, 8 % of "
        "peak, at 16k; 400 against 100 ms a verify), so the verify grows with context and looks "
        "like slow communication",
        "first A/B, before any NCCL variable: another --attention-backend, or another "
        "--decode-attention-backend with --speculative-attention-mode decode (flashinfer, "
        "trtllm_mla or flashmla where the GPU has them; some take topk 1 only)",
    )


@rule("tree-paged-backend", "servers.md A.1; sglang server_args.py (ValueError)", "sglang")
def tree_on_pages(setup: Setup) -> Iterator[Hit]:
    """A tree (topk above 1) with pages above one token needs certain backends."""
    spec, command = setup.speculation, setup.command
    if spec is None or (spec.topk or 1) <= 1:
        return
    backend = command.text("--attention-backend") or None
    named = backend or default_backend(setup)
    page = command.number("--page-size") or 1
    forced = _FORCED_PAGES.get(named or "", 0)
    if named is None or max(page, forced) <= 1:
        return
    old = setup.before("0.5.15")
    allowed = _PAGED_TREE["0.5.9"] if old else _PAGED_TREE[""]
    if named not in allowed:
        pages = (
            f"{named} forces pages of {forced} tokens" if forced > page else f"--page-size {page}"
        )
        yield error(
            f"topk {spec.topk} with attention backend {named}",
            f"{pages}, and a tree on pages runs on {', '.join(allowed)} only: a ValueError at "
            "start",
            f"--page-size 1, topk 1, or --attention-backend {allowed[0]}",
        )


@rule("tree-backend", "sgl-project/sglang#4360 (some backends take topk 1 only)", "sglang")
def tree_on_chain_backend(setup: Setup) -> Iterator[Hit]:
    """Backends that only take a chain."""
    spec, command = setup.speculation, setup.command
    if spec is None or (spec.topk or 1) <= 1:
        return
    names = {
        command.text("--attention-backend"),
        command.text("--decode-attention-backend"),
        command.text("--prefill-attention-backend"),
    }
    for name in ("trtllm_mha",):
        if name in names:
            yield error(
                f"topk {spec.topk} with {name}",
                f"{name} supports topk 1 only with speculation: a ValueError at start",
                "topk 1, or another attention backend",
            )


@rule("attention-backend-gpu", "servers.md A.1, sglang server_args.py: capability checks", "sglang")
def backend_of_another_gpu(setup: Setup) -> Iterator[Hit]:
    """A backend that this GPU does not have."""
    if setup.cc is None:
        return
    needs = {
        "fa3": (setup.cc in (80, 86, 87, 89, 90), "sm_80 to sm_90"),
        "trtllm_mha": (100 <= setup.cc < 120, "sm_100"),
        "trtllm_mla": (setup.cc >= 100, "sm_100 and newer"),
        "flashmla": (setup.cc in (90, 100, 103), "sm_90 and sm_100"),
        "cutlass_mla": (100 <= setup.cc < 120, "sm_100"),
    }
    for option in setup.command.options:
        if option.name.endswith("attention-backend") and option.values:
            fits, where = needs.get(option.values[0], (True, ""))
            if not fits:
                yield error(
                    option.text,
                    f"{option.values[0]} runs on {where}; this GPU is sm_{setup.cc}",
                    "flashinfer or triton",
                )


@rule("draft-attention-inherited", "sgl-project/sglang#23490", "sglang")
def draft_takes_target_backend(setup: Setup) -> Iterator[Hit]:
    """The draft inherits the target's backend; an EAGLE-3 head rarely has latent attention."""
    spec, command = setup.speculation, setup.command
    if spec is None or spec.algorithm != "EAGLE3" or spec.draft_model is None:
        return
    backend = _backend(setup)
    if backend in _MLA_ONLY and command.text("--speculative-draft-attention-backend") is None:
        if "mla" in spec.draft_model.lower().rsplit("/", maxsplit=1)[-1]:
            return
        yield warning(
            f"attention backend {backend}",
            f"the draft inherits {backend}, which serves latent attention only; an EAGLE-3 head "
            "has plain attention as a rule and then fails at start",
            "--speculative-draft-attention-backend flashinfer (or triton)",
        )


@rule("draft-extend-eager", "sgl-project/sglang#40762; servers.md A.2", "sglang")
def extend_outside_graphs(setup: Setup) -> Iterator[Hit]:
    """One eager draft-extend forward a step where the backend is not on the allow-list."""
    spec, command = setup.speculation, setup.command
    if spec is None or spec.algorithm not in ("EAGLE", "EAGLE3"):
        return
    backend = command.text("--speculative-draft-attention-backend") or _backend(setup)
    backend = backend or default_backend(setup)
    v2 = setup.env.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true", "yes")
    if setup.env.get("SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH", "").lower() in ("1", "true"):
        yield warning(
            "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH",
            "the draft-extend forward of every step runs eager; \"cuda graph: True\" in the log is "
            "about the verify only",
            "unset it",
        )  # fmt: skip
    elif setup.before("0.5.10") and v2 and backend not in (None, "triton", "trtllm_mla"):
        yield warning(
            f"draft attention backend {backend}",
            "spec v2 of 0.5.9 captures the draft-extend graph for triton and trtllm_mla only: one "
            "eager draft forward every step, although the log says \"cuda graph: True\" (the "
            "verify)",
            "--speculative-draft-attention-backend triton, or a newer version; check \"Capture "
            "draft extend\" in the log",
        )  # fmt: skip
    if command.option("--speculative-token-map") is not None and setup.before("0.5.20") is False:
        yield info(
            "--speculative-token-map", "a hot vocabulary makes the draft-extend forward run eager",
            "compare with and without",
        )  # fmt: skip


@rule("graph-backend-none", "servers.md A.2", "sglang")
def backend_without_graphs(setup: Setup) -> Iterator[Hit]:
    """Backends that switch CUDA graphs off."""
    backend = setup.command.text("--attention-backend")
    if backend in _NO_GRAPH:
        more = ""
        if backend == "flex_attention" and setup.speculation is not None:
            more = "; speculation is refused with it"
        yield (error if more else warning)(
            f"--attention-backend {backend}", f"it switches CUDA graphs off: launch bound{more}",
            "flashinfer, fa3 or triton",
        )  # fmt: skip


@rule("draft-shares-arguments", "sgl-project/sglang#22780", "sglang")
def draft_changes_global_arguments(setup: Setup) -> Iterator[Hit]:
    """A plain-attention draft beside a latent-attention target on an fa backend."""
    spec = setup.speculation
    backend = _backend(setup) or default_backend(setup)
    if spec is None or spec.algorithm != "EAGLE3" or not setup.mla or backend not in ("fa3", "fa4"):
        return
    if setup.before("0.5.15") is False:
        return
    yield warning(
        f"EAGLE3 with {backend} on a latent-attention target",
        "the draft worker sets process-wide arguments by its own architecture (chunked prefix "
        "cache off) after the target read them: \"AssertionError … disable_chunked_prefix_cache\" "
        "was reported; the arguments in force differ from the command line",
        "--disable-chunked-prefix-cache for both, and read back GET /server_info after start",
    )  # fmt: skip
