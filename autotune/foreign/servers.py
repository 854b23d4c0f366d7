"""A server's resolved arguments as knobs of ``model.spec``; what has no counterpart is left out.

SGLang's rules: servers reference A.1 (defaults of the tree, topk 1 means steps + 1 tokens);
vLLM speculates with chains of ``num_speculative_tokens`` drafts (B.1).
"""

from collections.abc import Mapping
from typing import Any

Args = Mapping[str, Any]


def sglang_knobs(args: Args) -> dict[str, Any]:
    """Knobs that SGLang's arguments (underscored names) state."""
    knobs: dict[str, Any] = {}
    tp = args.get("tp_size")
    if isinstance(tp, int):
        knobs["parallel.tp"] = tp
    algorithm = args.get("speculative_algorithm", "unknown")
    if algorithm is None or algorithm == "":
        knobs["speculation.method"] = "off"
    elif isinstance(algorithm, str) and algorithm.upper() == "EAGLE3":
        knobs["speculation.method"] = "eagle3"
        knobs |= _sglang_tree(args)
    if "disable_cuda_graph" in args:
        graphs = not args["disable_cuda_graph"]
        spec = knobs.get("speculation.method") == "eagle3"
        knobs["cuda_graph.decode"] = graphs
        knobs["cuda_graph.verify"] = graphs and spec
        if not graphs:
            knobs |= {"cuda_graph.draft": False, "cuda_graph.extend": False}
    return knobs


def _sglang_tree(args: Args) -> dict[str, Any]:
    steps, topk = args.get("speculative_num_steps"), args.get("speculative_eagle_topk")
    tokens = args.get("speculative_num_draft_tokens")
    if not isinstance(steps, int) or not isinstance(topk, int):
        return {}
    tree = {"speculation.steps": steps, "speculation.topk": topk}
    if topk == 1:
        tree["speculation.draft_tokens"] = steps + 1
    elif isinstance(tokens, int):
        tree["speculation.draft_tokens"] = tokens
    return tree


def vllm_knobs(args: Args) -> dict[str, Any]:
    """Knobs that vLLM's resolved configuration (underscored names) states."""
    knobs: dict[str, Any] = {}
    tp = args.get("tensor_parallel_size")
    if isinstance(tp, int):
        knobs["parallel.tp"] = tp
    spec = args.get("speculative_config", "unknown")
    if spec is None:
        knobs["speculation.method"] = "off"
    elif isinstance(spec, Mapping) and spec.get("method") == "eagle3":
        drafts = spec.get("num_speculative_tokens", spec.get("num_spec_tokens"))
        if isinstance(drafts, int):
            knobs |= {
                "speculation.method": "eagle3",
                "speculation.steps": drafts,
                "speculation.topk": 1,
                "speculation.draft_tokens": drafts + 1,
            }
    captured = args.get("full_graphs")
    if args.get("enforce_eager") is True:
        captured = False
    if isinstance(captured, bool):
        on = knobs.get("speculation.method") == "eagle3"
        knobs["cuda_graph.decode"] = captured
        knobs["cuda_graph.verify"] = captured and on
        if not captured:
            knobs |= {"cuda_graph.draft": False, "cuda_graph.extend": False}
    return knobs
