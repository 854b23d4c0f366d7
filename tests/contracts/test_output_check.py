"""When is an output the baseline's, a near-tie, wrong, or not known."""

import random
from collections.abc import Sequence

import pytest

from autotune.backends.engine_baselines import Baselines, Prompts
from autotune.backends.output_check import (
    MOST_FORCED,
    NOISE_PLACES,
    Forced,
    Place,
    Reference,
    SelfNoise,
    check_output,
    first_divergence,
    probe_places,
    self_noise,
    with_forced,
)
from model.spec import Knobs, Workload

BASE = Reference(((1, 2, 3, 4), (5, 6, 7, 8)), ((2.0, 0.01, 3.0, 1.0), (1.0, 2.0, 0.5, 4.0)))
NOISE = SelfNoise(epsilon=0.05, num_divergences=1, num_tokens=100)


@pytest.mark.parametrize(
    ("left", "right", "position"),
    [
        pytest.param([1, 2, 3], [1, 2, 3], None, id="equal"),
        pytest.param([1, 2, 3], [1, 9, 3], 1, id="middle"),
        pytest.param([1, 2], [1, 2, 3], 2, id="prefix"),
    ],
)
def test_the_first_difference_is_found(
    left: list[int], right: list[int], position: int | None
) -> None:
    assert first_divergence(left, right) == position


@pytest.mark.parametrize(
    ("output", "exact", "verdict"),
    [
        pytest.param([[1, 2, 3, 4], [5, 6, 7, 8]], True, "exact", id="equal-fp32"),
        pytest.param([[1, 2, 3, 4], [5, 6, 7, 8]], False, "exact", id="equal-bf16"),
        pytest.param([[1, 9, 3, 4], [5, 6, 7, 8]], True, "incorrect", id="fp32-tie-is-no-excuse"),
        pytest.param([[1, 9, 9, 9], [5, 6, 7, 8]], False, "near_tie", id="bf16-small-margin"),
        pytest.param([[1, 2, 9, 4], [5, 6, 7, 8]], False, "incorrect", id="bf16-large-margin"),
        pytest.param([[1, 9, 3, 4], [5, 6, 0, 8]], False, "incorrect", id="one-tie-one-wrong"),
        pytest.param([[1, 2, 3], [5, 6, 7, 8]], False, "incorrect", id="stopped-early"),
        pytest.param([[1, 2, 3, 4, 5], [5, 6, 7, 8]], False, "incorrect", id="went-on"),
    ],
)
def test_verdict_at_the_first_divergence(
    output: list[list[int]], exact: bool, verdict: str
) -> None:
    assert check_output(output, BASE, exact=exact, temperature=0.0, noise=NOISE).verdict == verdict


@pytest.mark.parametrize(
    ("reference", "noise", "temperature", "reason"),
    [
        pytest.param(BASE, NOISE, 0.7, "temperature 0.7", id="sampled"),
        pytest.param(None, NOISE, 0.0, "no baseline output", id="no-baseline"),
        pytest.param(Reference(BASE.tokens, None), NOISE, 0.0, "no log-prob", id="no-margins"),
        pytest.param(BASE, None, 0.0, "no log-prob", id="no-noise"),
    ],
)
def test_what_cannot_be_judged_is_unverified_with_the_reason(
    reference: Reference | None, noise: SelfNoise | None, temperature: float, reason: str
) -> None:
    output = [[1, 9, 3, 4], [5, 6, 7, 8]]
    checked = check_output(output, reference, exact=False, temperature=temperature, noise=noise)
    assert checked.verdict == "unverified"
    assert reason in checked.reason


def test_epsilon_follows_the_largest_change_of_a_margin_before_the_split() -> None:
    again = Reference(((1, 2, 3, 4), (5, 6, 7, 8)), ((2.0, 0.03, 3.4, 1.1), (1.0, 2.0, 0.5, 4.0)))
    noise = self_noise(BASE, [again])
    assert noise is not None
    # 0.4 where the lead is 3 nats says nothing of ties
    assert noise.epsilon == pytest.approx(0.15)
    assert (noise.num_divergences, noise.num_tokens) == (0, 8)


def test_a_baseline_that_repeats_itself_still_leaves_one_step_of_rounding() -> None:
    noise = self_noise(BASE, [BASE])
    assert noise is not None
    assert noise.epsilon == 2.0**-4


def test_a_baseline_that_diverges_from_itself_counts_both_margins_at_the_split() -> None:
    again = Reference(((1, 9, 9, 9),), ((2.0, 0.04, 9.0, 9.0),))
    noise = self_noise(BASE, [again])
    assert noise is not None
    assert noise.epsilon == pytest.approx(1.5 * 0.05)
    assert (noise.num_divergences, noise.num_tokens) == (1, 1)


def test_a_run_without_margins_says_that_the_margin_was_overcome_where_it_diverges() -> None:
    noise = self_noise(BASE, [Reference(((1, 2, 3, 4), (5, 6, 9, 9)), None)])
    assert noise is not None
    assert noise.epsilon == pytest.approx(1.5 * 0.5)
    assert (noise.num_divergences, noise.num_tokens) == (1, 6)
    assert self_noise(Reference(BASE.tokens, None), [BASE]) is None


def test_a_run_of_fewer_tokens_is_compared_as_far_as_it_goes() -> None:
    noise = self_noise(BASE, [Reference(((1, 2),), ((2.0, 0.03),))])
    assert noise is not None
    assert (noise.num_divergences, noise.num_tokens) == (0, 2)
    # one that goes on where the baseline ended is another
    longer = self_noise(BASE, [Reference(((1, 2, 3, 4, 5),), None)])
    assert longer is not None
    assert (longer.num_divergences, longer.num_tokens) == (1, 4)


def test_a_broken_baseline_does_not_excuse_what_differs_from_it() -> None:
    noise = self_noise(BASE, [Reference(((1, 2, 3, 4), (5, 6, 7, 0)), None)])
    assert noise is not None
    assert noise.epsilon == 1.0
    output = [[1, 2, 3, 4], [5, 6, 7, 1]]
    base = Reference(BASE.tokens, (BASE.margins[0], (1.0, 2.0, 0.5, 4.5)))  # type: ignore[index]
    checked = check_output(output, base, exact=False, temperature=0.0, noise=noise)
    assert checked.verdict == "incorrect"


@pytest.mark.parametrize(
    ("num_prompts", "margins", "verdict", "reason"),
    [
        pytest.param(16, (0.15,), "near_tie", "1 beyond epsilon", id="one-of-many"),
        pytest.param(16, (0.15, 0.06), "near_tie", "2 beyond epsilon", id="two-of-many"),
        pytest.param(16, (0.15, 0.1, 0.06), "incorrect", "0.15 nats, above epsilon 0.05 (and 2 "
                     "more; 2 may)", id="three-of-many"),
        pytest.param(16, (0.25,), "incorrect", "0.25 nats", id="one-by-far"),
        pytest.param(4, (0.15,), "incorrect", "0.15 nats", id="one-of-few"),
    ],
)  # fmt: skip
def test_few_of_many_prompts_may_exceed_epsilon_but_not_by_far(
    num_prompts: int, margins: tuple[float, ...], verdict: str, reason: str
) -> None:
    base = Reference(((1, 2, 3),) * num_prompts, tuple(
        (1.0, margins[i] if i < len(margins) else 1.0, 1.0) for i in range(num_prompts)
    ))  # fmt: skip
    output = [(1, 9, 9)] * len(margins) + [(1, 2, 3)] * (num_prompts - len(margins))
    noise = SelfNoise(epsilon=0.05, num_divergences=3, num_tokens=30)

    def force(places: Sequence[Place]) -> list[Forced]:
        # the divergence is not confirmed, what follows is
        return [Forced(2, 9, 0.5) if text == (1,) else Forced(9, 2, 1.0) for _, text in places]

    for forced in (None, force):
        checked = check_output(
            output, base, exact=False, temperature=0.0, noise=noise, force=forced
        )
        assert (checked.verdict, reason in checked.reason) == (verdict, True), checked


def test_too_many_near_ties_are_incorrect() -> None:
    prompts = 40
    base = Reference(
        tuple((1, 2) for _ in range(prompts)), tuple((1.0, 0.01) for _ in range(prompts))
    )
    quiet = SelfNoise(epsilon=0.05, num_divergences=0, num_tokens=10_000)
    few = [(1, 2)] * (prompts - 1) + [(1, 3)]
    many = [(1, 3)] * prompts
    assert check_output(few, base, exact=False, temperature=0.0, noise=quiet).verdict == "near_tie"
    checked = check_output(many, base, exact=False, temperature=0.0, noise=quiet)
    assert checked.verdict == "incorrect"
    assert "40 of 40 prompts diverge" in checked.reason


def test_the_bound_of_ties_holds_for_a_faithful_configuration() -> None:
    rng = random.Random(0)
    rate, alarms = 0.002, 0
    for _ in range(300):
        seen = sum(rng.random() < rate for _ in range(2000))
        noise = SelfNoise(epsilon=0.05, num_divergences=seen, num_tokens=2000)
        split = [rng.random() < rate * 50 for _ in range(40)]
        base = Reference(tuple((1,) * 50 for _ in split), tuple((0.01,) * 50 for _ in split))
        output = [(1,) * 49 + (2,) if s else (1,) * 50 for s in split]
        checked = check_output(output, base, exact=False, temperature=0.0, noise=noise)
        alarms += checked.verdict == "incorrect"
    assert alarms <= 6


LONG = Reference(((1, 2, 3, 4, 5, 6, 7, 8),), ((2.0, 0.6, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0),))


def answers(**by_length: Forced) -> dict[int, Forced]:
    return {int(name.removeprefix("at")): found for name, found in by_length.items()}


@pytest.mark.parametrize(
    ("forced", "verdict", "reason"),
    [
        pytest.param(answers(at1=Forced(9, 2, 0.3)), "near_tie", "takes the same token",
                     id="plain-decoding-takes-it-too"),
        pytest.param(answers(at1=Forced(2, 9, 0.04)), "near_tie", "margins up to 0.04",
                     id="forced-margin-is-small"),
        pytest.param(answers(at1=Forced(2, 9, 0.5)), "incorrect", "margin is 0.5 nats",
                     id="forced-margin-is-large"),
        pytest.param(answers(at1=Forced(2, 7, 0.01)), "incorrect", "margin is 0.6 nats",
                     id="neither-best-nor-second"),
        pytest.param(answers(at1=Forced(9, 2, 0.3), at7=Forced(4, 8, 0.2)), "incorrect",
                     "prompt 0, token 7, after its divergence at 1", id="wrong-later"),
        pytest.param(answers(at1=Forced(9, 2, 0.3), at7=Forced(4, 8, 0.02)), "near_tie",
                     "takes the same token", id="a-tie-later"),
    ],
)  # fmt: skip
def test_a_divergence_is_judged_by_plain_decoding_of_the_text_before_it(
    forced: dict[int, Forced], verdict: str, reason: str
) -> None:
    output = (1, 9, 9, 9, 9, 9, 9, 8)

    def force(places: Sequence[Place]) -> list[Forced]:
        for index, text in places:
            assert text == output[: len(text)]
            assert index == 0
        # elsewhere plain decoding takes what was emitted
        return [forced.get(len(text), Forced(output[len(text)], 0, 2.0)) for _, text in places]

    checked = check_output([output], LONG, exact=False, temperature=0.0, noise=NOISE, force=force)
    assert (checked.verdict, reason in checked.reason) == (verdict, True), checked


def test_places_of_one_check_are_bounded_and_divergences_come_first() -> None:
    prompts = 40
    base = Reference(
        tuple((1, 2, 3, 4) for _ in range(prompts)),
        tuple((1.0, 0.01, 1.0, 1.0) for _ in range(prompts)),
    )
    asked: list[Place] = []

    def force(places: Sequence[Place]) -> list[Forced]:
        asked.extend(places)
        return [Forced(9, 2, 0.1) for _ in places]

    output = [(1, 9, 9, 9)] * prompts
    check_output(output, base, exact=False, temperature=0.0, noise=NOISE, force=force)
    assert asked == [(index, (1,)) for index in range(MOST_FORCED)]


def test_noise_is_widened_by_the_baselines_own_text_run_as_a_prompt() -> None:
    places = probe_places(BASE)
    assert places == [(i, BASE.tokens[i][:n]) for i in range(2) for n in (1, 2, 3)]
    margins = tuple((0.0, *(1.0 + i + 1000.0 * n for n in range(8))) for i in range(200))
    many = Reference(tuple((1,) * 9 for _ in range(200)), margins)
    # the smallest margins, each prompt's first token aside
    assert probe_places(many) == [(i, (1,)) for i in range(NOISE_PLACES)]
    assert len(probe_places(many, 2048)) == 32
    assert len(probe_places(many, 100_000)) == MOST_FORCED
    same = [Forced(BASE.tokens[i][len(t)], 0, BASE.margins[i][len(t)]) for i, t in places]  # type: ignore[index]
    quiet = with_forced(NOISE, BASE, places, same)
    assert (quiet.epsilon, quiet.num_divergences, quiet.num_tokens) == (0.05, 1, 106)
    # another expert was chosen at one place, another token at a second
    moved = [*same]
    moved[1] = Forced(same[1].token, 0, same[1].margin + 0.4)
    moved[4] = Forced(99, same[4].token, 0.1)
    loud = with_forced(NOISE, BASE, places, moved)
    assert loud.epsilon == pytest.approx(1.5 * max(0.4, 0.1 + same[4].margin))
    assert loud.num_divergences == 2


def workload(concurrency: int = 2) -> Workload:
    return Workload(
        prompts="p",
        prompts_sha256="p",
        chat_template=None,
        input_len=4,
        output_len=4,
        context=6,
        temperature=0.0,
        ignore_eos=True,
        seed=0,
        concurrency=concurrency,
    )


def test_in_16_bit_the_baseline_is_run_again_and_with_another_batch_size() -> None:
    asked: list[tuple[int, int, bool]] = []

    def plain(
        prompts: Prompts, batch: int, margins: bool, max_tokens: int | None = None
    ) -> Reference:
        if max_tokens == 1:
            # forced: the second token after (prompt, first token), as decoding takes it
            assert all(len(p) == 2 for p in prompts)
            return Reference(tuple((1,) for _ in prompts), tuple((0.5,) for _ in prompts))
        # running it again needs no more than a part of each output
        assert max_tokens in ((64,) if len(asked) % 4 in (1, 3) else (None,))
        asked.append((len(prompts), batch, margins))
        tokens = tuple((int(p[0]), 1) for p in prompts)
        return Reference(tokens, tuple((1.0 + 0.01 * batch, 0.5) for _ in tokens))

    baselines = Baselines(exact=False)
    off = Knobs.of({"speculation.method": "off"})
    prompts = [(i,) for i in range(6)]
    baselines.prepare(off, workload(2), prompts, plain)
    # the third as repeats are measured
    assert asked == [(6, 2, True), (4, 2, True), (6, 2, False), (4, 1, True)]
    asked.clear()
    baselines.prepare(off, workload(2), prompts, plain)
    assert asked == []
    baselines.prepare(off, workload(1), prompts[:1], plain)
    assert asked == [(1, 1, True), (1, 1, True), (1, 1, False), (2, 2, True)]
    assert baselines.check(off, workload(1), [(0, 1)]).verdict == "exact"
    assert baselines.check(off, workload(1), [(0, 2)]).verdict == "incorrect"


def test_in_fp32_the_first_baseline_repeat_is_the_reference() -> None:
    baselines = Baselines(exact=True)
    off = Knobs.of({"speculation.method": "off"})

    def never(*_: object) -> Reference:
        raise AssertionError("a measured baseline needs no run of its own")

    baselines.prepare(off, workload(), [(1,), (2,)], never)
    assert baselines.check(off, workload(), [(1,), (2,)]).verdict == "exact"
    assert baselines.check(off, workload(), [(1,), (3,)]).verdict == "incorrect"
