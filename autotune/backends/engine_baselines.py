"""Baseline output by workload: what every configuration's output is compared with."""

from collections.abc import Sequence
from typing import Protocol

from autotune.backends.output_check import (
    Checked,
    Forced,
    Place,
    Reference,
    SelfNoise,
    Tokens,
    check_output,
    probe_places,
    self_noise,
    with_forced,
)
from model.spec import Knobs, Workload

Prompts = Sequence[tuple[int, ...]]

#: prompts on which the baseline's own noise is estimated by running it again with margins, and
#: tokens of each: such runs are slow, cycle by cycle with the host in between
NOISE_PROMPTS, NOISE_LENGTH = 4, 64


class Plain(Protocol):
    """Plain decoding of prompts, ``batch_size`` at a time, with top-2 margins where asked for.

    ``max_tokens``: tokens of each instead of the workload's output length.
    """

    def __call__(
        self, prompts: Prompts, batch_size: int, margins: bool, max_tokens: int | None = None
    ) -> Reference: ...


class Baselines:
    """References of one backend. ``exact``: fp32, where output must be equal token by token."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._references: dict[Workload, Reference] = {}
        self._noise: dict[Workload, SelfNoise | None] = {}
        #: greedy repeats of the same knobs give the same text, and forcing it takes time
        self._checked: dict[tuple[Workload, Reference | None, Tokens], Checked] = {}

    def prepare(self, knobs: Knobs, workload: Workload, prompts: Prompts, plain: Plain) -> None:
        """Make the reference of ``workload`` unless there is one or a repeat will serve as it.

        In fp32 the first measured baseline repeat becomes the reference. In 16 bit margins and the
        baseline's own noise are needed, which no measured repeat should pay for.
        """
        if workload.temperature > 0 or workload in self._references:
            return
        if self._exact:
            if knobs.method != "off":
                self._references[workload] = plain(prompts, workload.concurrency, False)
            return
        reference = plain(prompts, workload.concurrency, True)
        few = prompts[:NOISE_PROMPTS]
        again = plain(few, workload.concurrency, True, NOISE_LENGTH)
        # as repeats are measured: without margins another path, which rounds in its own way
        plainly = plain(prompts, workload.concurrency, False)
        noise = self_noise(reference, (again, _other_batch(few, workload, plain), plainly))
        if noise is not None:
            places = probe_places(reference, max(map(len, prompts)))
            noise = with_forced(noise, reference, places, _forced(prompts, places, plain))
        self._noise[workload] = noise
        self._references[workload] = reference

    def check(
        self,
        knobs: Knobs,
        workload: Workload,
        outputs: Tokens,
        prompts: Prompts = (),
        plain: Plain | None = None,
    ) -> Checked:
        """Compare the output of a measured repeat with the reference of its workload.

        ``plain`` runs what has to be looked at again; without it margins alone decide.
        """
        tokens = tuple(tuple(output) for output in outputs)
        if knobs.method == "off" and workload.temperature == 0:
            self._references.setdefault(workload, Reference(tokens, None))
        reference = self._references.get(workload)
        key = (workload, reference, tokens)
        if key not in self._checked:
            self._checked[key] = check_output(
                tokens,
                reference,
                exact=self._exact,
                temperature=workload.temperature,
                noise=self._noise.get(workload),
                force=None if plain is None else lambda places: _forced(prompts, places, plain),
            )
        return self._checked[key]


def _forced(prompts: Prompts, places: Sequence[Place], plain: Plain) -> list[Forced]:
    """One token of plain decoding after each place's text, which is run as a prompt."""
    if not places:
        return []
    found = plain([(*prompts[index], *text) for index, text in places], 1, True, 1)
    assert found.margins is not None
    return [
        Forced(
            found.tokens[number][0],
            None if found.seconds is None else found.seconds[number][0],
            found.margins[number][0],
        )
        for number in range(len(places))
    ]


def _other_batch(few: Prompts, workload: Workload, plain: Plain) -> Reference:
    """The same prompts in another batch size: alone, or each beside itself at a level of one."""
    if workload.concurrency > 1:
        return plain(few, 1, True, NOISE_LENGTH)
    doubled = plain([prompt for prompt in few for _ in range(2)], 2, True, NOISE_LENGTH)
    margins = None if doubled.margins is None else doubled.margins[::2]
    return Reference(doubled.tokens[::2], margins)
