"""Values that a server's own checks refuse."""

import re
from collections.abc import Iterator
from difflib import get_close_matches

from autotune.lint.findings import Hit, error, rule
from autotune.lint.setup import Setup

#: option -> (engine, its range in words)
_FRACTIONS = {
    "--gpu-memory-utilization": ("vllm", "above 0, at most 1"),
    "--mem-fraction-static": ("sglang", "above 0, below 1"),
}
#: vLLM 0.16 and 0.33, config/speculative.py
_METHODS = (
    "ngram", "ngram_gpu", "medusa", "mlp_speculator", "draft_model", "suffix", "eagle", "eagle3",
    "mtp", "dflash", "deepseek_mtp", "extract_hidden_states", "custom_class",
)  # fmt: skip
#: adaptive speculation of SGLang 0.5.23 keeps a graph for each of these step counts
_ADAPTIVE_STEPS = (1, 3, 5, 7)


@rule("value-range", "servers' argument checks", "sglang", "vllm")
def fraction_out_of_range(setup: Setup) -> Iterator[Hit]:
    """A share of memory given in per cent or as a negative number."""
    for name, (engine, words) in _FRACTIONS.items():
        option, text = setup.command.option(name), setup.command.text(name)
        if setup.engine != engine or option is None or text is None:
            continue
        try:
            value = float(text)
        except ValueError:
            continue
        if value <= 0.0 or value > 1.0 or (engine == "sglang" and value == 1.0):
            percent = 1.0 < value <= 100.0
            yield error(
                option.text,
                f"it is a share of the GPU's memory, {words}; the server refuses {text} or runs "
                "out of memory at start",
                f"write {name} {value / 100:g}" if percent and value < 100 else f"{name} 0.9",
            )


#: options of both servers that their parsers read as whole numbers
_WHOLE = (
    "--tp-size", "--tensor-parallel-size", "--pp-size", "--pipeline-parallel-size", "--dp-size",
    "--data-parallel-size", "--ep-size", "--nnodes", "--node-rank", "--max-num-seqs",
    "--max-running-requests", "--context-length", "--speculative-num-steps",
    "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--cuda-graph-max-bs",
    "--cuda-graph-max-bs-decode", "--max-cudagraph-capture-size", "--page-size",
    "--chunked-prefill-size", "--base-gpu-id",
)  # fmt: skip


@rule("value-not-a-number", "servers' argument parsers (argparse, type int)", "sglang", "vllm")
def word_where_a_number_belongs(setup: Setup) -> Iterator[Hit]:
    """A word, a fraction or a unit in an option that takes a whole number."""
    for option in setup.command.options:
        if option.name not in _WHOLE or not option.values or setup.command.printed:
            continue
        text = option.values[0]
        # a variable of a script or a placeholder of a recipe is no mistake; None is a default
        if re.fullmatch(r"[-+]?\d+", text) or re.search(r"[$<{\[]", text) or text == "None":
            continue
        number = re.match(r"\d+", text)
        yield error(
            option.text,
            f"{option.written} takes a whole number; the server refuses {text!r} at start",
            f"write {option.written} {number[0] if number else 'N'}",
        )


@rule("spec-method-misspelt", "vllm config/speculative.py: the method is one of a list", "vllm")
def method_of_another_name(setup: Setup) -> Iterator[Hit]:
    """A method that differs from a known one by case or punctuation, or by a letter."""
    method = setup.command.config("--speculative-config").get("method")
    if not isinstance(method, str) or method in _METHODS:
        return
    plain = re.sub(r"[^a-z0-9]", "", method.lower())
    same = [known for known in _METHODS if known.replace("_", "") == plain]
    near = same or get_close_matches(method.lower(), _METHODS, n=1, cutoff=0.85)
    if near and not (not same and method.endswith("_mtp")):
        yield error(
            f"speculative_config.method {method}",
            "vLLM matches the method by its exact lower-case name and refuses this one at start",
            f'write "method": "{near[0]}"',
        )


@rule("spec-adaptive-steps", "servers.md A.3: steps must be in the candidate set", "sglang")
def steps_outside_the_candidates(setup: Setup) -> Iterator[Hit]:
    """Adaptive speculation starts from one of the step counts it has graphs for."""
    command, spec = setup.command, setup.speculation
    if spec is None or not command.has("--speculative-adaptive"):
        return
    steps = spec.given.get("steps")
    own = command.option("--speculative-adaptive-config") is not None
    if steps is not None and not own and steps not in _ADAPTIVE_STEPS:
        yield error(
            f"--speculative-num-steps {steps}",
            "with --speculative-adaptive it must be one of the candidates "
            f"({', '.join(map(str, _ADAPTIVE_STEPS))} without a table of your own)",
            f"write {min(_ADAPTIVE_STEPS, key=lambda s: (abs(s - steps), s))}, or give "
            "--speculative-adaptive-config",
        )
