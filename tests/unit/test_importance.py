"""What a study says of its knobs: an effect goes to the knob that has it, or to none."""

import math

import numpy as np
import pytest

from autotune.explain.importance import Importance, importances
from model.spec import Knobs

NOISE = 0.01


def knobs_of(steps: int | None, **more: object) -> Knobs:
    """A chain (None: plain decoding) with further knobs."""
    if steps is None:
        return Knobs.of({"speculation.method": "off", **more})  # type: ignore[dict-item]
    tree = {"speculation.method": "eagle3", "speculation.steps": steps, "speculation.topk": 1}
    return Knobs.of({**tree, **more})  # type: ignore[dict-item]


def judged(measured: list[tuple[Knobs, float]], **space: list[object]) -> dict[str, Importance]:
    """By knob."""
    listed = {name.replace("__", "."): values for name, values in space.items()}
    return {one.knob: one for one in importances(measured, {}, NOISE, listed)}  # type: ignore[arg-type]


def test_what_speculation_is_worth_is_not_shared_with_the_knobs_of_its_tree() -> None:
    rng = np.random.default_rng(0)
    measured = []
    for proto in ("auto", "LL", "LL128", "Simple"):
        for steps in (None, 1, 2, 3):
            gain = 0.0 if steps is None else 0.4 + 0.02 * steps
            knobs = knobs_of(steps, **{"nccl.proto": proto})
            measured.append((knobs, 80.0 * math.exp(gain + 0.004 * rng.standard_normal())))
    found = judged(
        measured,
        speculation__method=["off", "eagle3"],
        speculation__steps=[1, 2, 3],
        speculation__draft_tokens=[2, 3, 4],
        nccl__proto=["auto", "LL", "LL128", "Simple"],
    )
    method = found["speculation.method"]
    assert method.verdict == "matters"
    assert method.best_value == "eagle3"
    assert method.effect is not None
    # ridge shrinks it a little; shared with the tree's columns it was a seventh
    assert method.effect.median == pytest.approx(math.expm1(0.44), rel=0.25)
    assert found["nccl.proto"].verdict != "matters"
    tokens = found["speculation.draft_tokens"]
    assert tokens.verdict == "cannot matter"
    assert "follow from its steps" in tokens.reason


def test_knobs_that_only_varied_together_are_not_judged_apart() -> None:
    pairs = [("auto", "auto"), ("LL", "ring")] * 6
    measured = [
        (
            knobs_of(1 + n % 3, **{"nccl.proto": proto, "nccl.algo": algo}),
            100.0 * (1.3 if proto == "LL" else 1.0) * (1 + 0.001 * n),
        )
        for n, (proto, algo) in enumerate(pairs)
    ]
    found = judged(
        measured,
        nccl__proto=["auto", "LL"],
        nccl__algo=["auto", "ring"],
        speculation__steps=[1, 2, 3],
    )
    for name, twin in (("nccl.proto", "nccl.algo"), ("nccl.algo", "nccl.proto")):
        assert found[name].verdict == "not enough data"
        assert f"varied together with {twin}" in found[name].reason
        assert found[name].best_value is None
    assert "together" not in found["speculation.steps"].reason
