"""Speculation options that a server refuses, changes, or cannot use."""

from collections.abc import Iterator

from autotune.lint.findings import Hit, error, info, rule, warning
from autotune.lint.setup import Setup
from autotune.lint.speculation import EAGLE_FAMILY

_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
_LATER_ALGORITHMS = ("DFLASH", "DSPARK", "UNO", "FROZEN_KV_MTP")
_SIZE_FLAGS = {
    "steps": "--speculative-num-steps",
    "topk": "--speculative-eagle-topk",
    "draft_tokens": "--speculative-num-draft-tokens",
}


@rule("spec-options-alone", "servers.md A.1: without an algorithm nothing speculates", "sglang")
def sizes_without_algorithm(setup: Setup) -> Iterator[Hit]:
    """Speculative options while speculation is off."""
    given = [o for o in setup.command.options if o.name.startswith("--speculative-")]
    if setup.speculation is None and given and not setup.command.printed:
        yield error(
            ", ".join(sorted({option.name for option in given})),
            "inert: no --speculative-algorithm is given, so the server decodes without speculation",
            "add --speculative-algorithm EAGLE3",
        )


@rule("spec-algorithm-unknown", "servers.md A.1", "sglang")
def unknown_algorithm(setup: Setup) -> Iterator[Hit]:
    """An algorithm that this version does not have."""
    spec = setup.speculation
    if spec is None or spec.algorithm in _ALGORITHMS:
        return
    if spec.algorithm in _LATER_ALGORITHMS:
        if setup.before("0.5.10"):
            yield error(spec.algorithm, "not in SGLang 0.5.9 and older", "upgrade SGLang")
        return
    yield error(
        f"--speculative-algorithm {spec.algorithm}",
        f"no SGLang release has it; known: {', '.join(_ALGORITHMS + _LATER_ALGORITHMS)}",
        "EAGLE3 for an EAGLE-3 head, EAGLE (NEXTN) for a built-in MTP layer",
    )


@rule("spec-sizes-incomplete", "servers.md A.1 (bare AssertionError)", "sglang")
def partly_given(setup: Setup) -> Iterator[Hit]:
    """All three of steps, topk and draft tokens, or none."""
    spec = setup.speculation
    if spec is None or spec.algorithm not in EAGLE_FAMILY or not spec.given:
        return
    missing = [flag for name, flag in _SIZE_FLAGS.items() if name not in spec.given]
    chain = spec.topk == 1 and spec.steps is not None
    if not missing or (chain and missing == ["--speculative-num-draft-tokens"]):
        return
    how = "stops at a bare AssertionError" if "steps" not in spec.given else "fails on a None"
    yield error(
        ", ".join(f"{_SIZE_FLAGS[name]} {value}" for name, value in spec.given.items()),
        f"{', '.join(missing)} missing: SGLang takes all three sizes or none, and {how}",
        "give all three, or none (SGLang then takes steps 3, topk 1, draft tokens 4)",
    )


@rule("spec-draft-tokens-changed", "sgl-project/sglang#8228", "sglang")
def chain_is_resized(setup: Setup) -> Iterator[Hit]:
    """topk 1 has exactly steps + 1 tokens; SGLang changes the number by itself."""
    spec = setup.speculation
    if spec is None or spec.topk != 1 or spec.steps is None or spec.algorithm not in EAGLE_FAMILY:
        return
    asked = spec.given.get("draft_tokens")
    right = spec.steps + 1
    if asked is None or asked == right:
        return
    if asked < right:
        lost = f"a version that does not would drop the last {right - asked} draft(s) of each chain"
    else:
        lost = f"the {asked - right} further token(s) never exist"
    yield warning(
        f"--speculative-num-draft-tokens {asked}",
        f"topk 1 is a chain of steps + 1 = {right} tokens (root included): SGLang changes {asked} "
        f"to {right} with a warning in its log; {lost}",
        f"write --speculative-num-draft-tokens {right}"
        + (f", or --speculative-num-steps {asked - 1}" if asked > 1 else ""),
    )


@rule("spec-tree-too-large", "sgl-project/sglang#5160")
def more_tokens_than_nodes(setup: Setup) -> Iterator[Hit]:
    """Draft tokens beyond what steps and topk can draft: "selected index k out of range"."""
    spec = setup.speculation
    if spec is None or spec.topk == 1 or spec.draft_tokens is None or spec.largest_tree is None:
        return
    if spec.draft_tokens > spec.largest_tree:
        yield error(
            f"draft tokens {spec.draft_tokens}",
            f"steps {spec.steps} and topk {spec.topk} draft at most 1 + topk + (steps - 1) x "
            f"topk^2 = {spec.largest_tree} tokens (root included): \"selected index k out of "
            "range\" while serving",
            f"at most {spec.largest_tree}, or more steps or topk",
        )  # fmt: skip


@rule("spec-tree-too-small", "speculation.md 1.3: accept length is 1 + the sum over nodes kept")
def fewer_tokens_than_steps(setup: Setup) -> Iterator[Hit]:
    """Draft steps whose tokens cannot all be kept: a path of all steps does not fit the tree."""
    spec = setup.speculation
    if spec is None or spec.topk in (None, 1) or spec.steps is None or spec.draft_tokens is None:
        return
    if spec.draft_tokens < 2:
        yield error(
            f"draft tokens {spec.draft_tokens}", "the root alone is no speculation", "raise it"
        )
    elif spec.draft_tokens < spec.steps + 1:
        yield warning(
            f"draft tokens {spec.draft_tokens}",
            f"{spec.draft_tokens - 1} drafts are kept, so no path reaches depth {spec.steps}: "
            f"{spec.steps - spec.draft_tokens + 1} of {spec.steps} draft steps are paid for "
            "nothing",
            f"at least steps + 1 = {spec.steps + 1} draft tokens, or fewer steps",
        )


@rule("spec-v2-topk", "sgl-project/sglang#13352", "sglang")
def overlap_worker_needs_chain(setup: Setup) -> Iterator[Hit]:
    """Spec v2 of 0.5.x up to 0.5.9 takes topk 1 only; up to 0.5.12 topk > 1 falls back to v1."""
    spec = setup.speculation
    if spec is None or spec.topk is None or spec.topk < 2:
        return
    asked = setup.env.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true", "yes")
    if asked and setup.before("0.5.10") is not False:
        known = setup.before("0.5.10") is True
        yield (error if known else warning)(
            f"SGLANG_ENABLE_SPEC_V2 with topk {spec.topk}",
            "spec v2 supports topk 1 only up to 0.5.9: a ValueError at start (older builds: "
            "\"Sizes of tensors must match\")",
            "topk 1, or SGLANG_ENABLE_SPEC_V2=0",
        )  # fmt: skip
    elif setup.before("0.5.10") is False and setup.before("0.5.13"):
        yield warning(
            f"topk {spec.topk}",
            "spec v2 of this version takes topk 1 only: the server falls back to v1, without the "
            "overlap scheduler",
            "topk 1, or a version from 0.5.15 on",
        )


@rule(
    "spec-tokens-missing", "vllm/config/speculative.py: num_speculative_tokens must be > 0", "vllm"
)
def no_number_of_drafts(setup: Setup) -> Iterator[Hit]:
    """vLLM takes the length of the chain from the user, or from an MTP checkpoint."""
    spec = setup.speculation
    if spec is None:
        return
    if spec.steps is not None and spec.steps < 1:
        yield error(
            f"num_speculative_tokens {spec.steps}", "it must be above 0", "2 or 3 to begin with"
        )
    elif spec.steps is None and spec.algorithm.lower() not in ("mtp", "suffix"):
        yield error("speculative_config", "num_speculative_tokens is missing", "add it, 3 to begin")


@rule("spec-parallel-conflict", "servers.md A.1 (server_args.py, speculative_hook.py)", "sglang")
def conflicting_parallelism(setup: Setup) -> Iterator[Hit]:
    """Parallel modes that a method cannot run under."""
    spec = setup.speculation
    if spec is None:
        return
    command = setup.command
    attention_dp = (
        command.has("--enable-dp-attention") or (command.number("--attn-dp-size") or 1) > 1
    )
    if attention_dp and spec.algorithm in ("STANDALONE", "NGRAM"):
        yield error(
            spec.algorithm, f"{spec.algorithm} refuses DP attention: a ValueError at start",
            "drop DP attention, or use EAGLE3",
        )  # fmt: skip
    stages = command.number("--pp-size") or 1
    if stages > 1 and setup.before("0.5.10") is not False:
        yield (error if setup.before("0.5.10") else warning)(
            f"--pp-size {stages}", "0.5.9 and older refuse speculation with pipeline stages",
            "tensor parallelism only, or a newer version",
        )  # fmt: skip
    chain = spec.topk in (None, 1) and spec.algorithm in ("EAGLE", "EAGLE3")
    if command.has("--speculative-adaptive") and not chain:
        yield error(
            "--speculative-adaptive",
            f"it takes EAGLE or EAGLE3 with topk 1, not {spec.text()}",
            "topk 1, or drop it",
        )
    if command.has("--speculative-use-rejection-sampling") and spec.topk not in (None, 1):
        yield error(
            "--speculative-use-rejection-sampling",
            f"it is implemented for a chain only; topk is {spec.topk}",
            "topk 1, or drop it",
        )


@rule("spec-lossy", "servers.md A.1: thresholds below 1 accept tokens the target would not emit")
def lossy_acceptance(setup: Setup) -> Iterator[Hit]:
    """Acceptance rules that change the output."""
    for name in ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"):
        text = setup.command.text(name)
        try:
            if text is not None and float(text) < 1.0:
                yield warning(
                    f"{name} {text}",
                    "below 1.0 the output is no longer the target's: accept length and speed "
                    "cannot be compared with lossless runs",
                    "1.0 (the default)",
                )
        except ValueError:
            continue
    simulated = setup.env.get("SGLANG_SIMULATE_ACC_LEN")
    method = setup.command.config("--speculative-config").get("rejection_sample_method")
    if simulated not in (None, "", "-1"):
        yield warning(
            f"SGLANG_SIMULATE_ACC_LEN={simulated}", "acceptance is faked: the text is garbage and "
            "the accept length is this number", "for step times only; unset it to serve",
        )  # fmt: skip
    if method == "synthetic":
        yield warning(
            "rejection_sample_method synthetic", "acceptance is faked: the text is garbage",
            "for step times only; drop it to serve",
        )  # fmt: skip


@rule(
    "spec-baseline-differs",
    "servers.md A.1: what else changes when speculation is turned on",
    "sglang",
)
def baseline_is_another_server(setup: Setup) -> Iterator[Hit]:
    """Speculation changes more than the draft; a fair baseline needs the same."""
    spec = setup.speculation
    if spec is None:
        return
    command = setup.command
    v2 = setup.env.get("SGLANG_ENABLE_SPEC_V2", "").lower() in ("1", "true", "yes")
    if setup.before("0.5.10") and not v2:
        yield info(
            "overlap scheduler",
            "0.5.9 turns the overlap scheduler off with speculation (SGLANG_ENABLE_SPEC_V2 off): "
            "the baseline runs with it, so the two differ in more than speculation",
            "SGLANG_ENABLE_SPEC_V2=1 (topk 1), or --disable-overlap-schedule for the baseline",
        )
    if command.number("--max-running-requests") is None:
        load = setup.load or 0
        (hit := warning if load > 48 else info)
        yield hit(
            "--max-running-requests",
            "unset with speculation SGLang takes 48 and says so in its log only"
            + (
                f": {load} requests will queue" if load > 48 else "; the baseline has no such limit"
            ),
            f"--max-running-requests {max(load, 48)} in both runs",
        )
    if command.has("--enable-mixed-chunk"):
        yield info(
            "--enable-mixed-chunk", "inert: speculation switches mixed chunked prefill off", ""
        )


@rule("spec-chain", "sgl-project/sglang#11948; speculation.md 1.3", "sglang")
def chain_against_published_trees(setup: Setup) -> Iterator[Hit]:
    """A chain asked for by name: papers measure trees, and on other data."""
    spec = setup.speculation
    if spec is None or spec.algorithm != "EAGLE3" or spec.given.get("topk") != 1:
        return
    yield info(
        spec.text(),
        "topk 1 is a chain; published EAGLE figures are of trees (at equal depth 21 to 24 % more "
        "accept length, for 0.3 to 0.5 more speed-up) and of their own prompts and drafts",
        "judge it against your own baseline with the same options, never against a paper",
    )
