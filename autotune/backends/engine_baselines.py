"""Baseline output by workload: what every configuration's output is compared with."""

from collections.abc import Callable, Sequence

from autotune.backends.output_check import (
    Checked,
    Reference,
    SelfNoise,
    Tokens,
    check_output,
    self_noise,
)
from model.spec import Knobs, Workload

Prompts = Sequence[tuple[int, ...]]
#: plain decoding of (prompts, batch size, with margins)
Plain = Callable[[Prompts, int, bool], Reference]

#: prompts on which the baseline's own noise is estimated
NOISE_PROMPTS = 4


class Baselines:
    """References of one backend. ``exact``: fp32, where output must be equal token by token."""

    def __init__(self, *, exact: bool) -> None:
        self._exact = exact
        self._references: dict[Workload, Reference] = {}
        self._noise: dict[Workload, SelfNoise | None] = {}

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
        again = plain(few, workload.concurrency, True)
        self._noise[workload] = self_noise(reference, (again, _other_batch(few, workload, plain)))
        self._references[workload] = reference

    def check(self, knobs: Knobs, workload: Workload, outputs: Tokens) -> Checked:
        """Compare the output of a measured repeat with the reference of its workload."""
        if knobs.method == "off" and workload.temperature == 0:
            tokens = tuple(tuple(output) for output in outputs)
            self._references.setdefault(workload, Reference(tokens, None))
        return check_output(
            outputs,
            self._references.get(workload),
            exact=self._exact,
            temperature=workload.temperature,
            noise=self._noise.get(workload),
        )


def _other_batch(few: Prompts, workload: Workload, plain: Plain) -> Reference:
    """The same prompts in another batch size: alone, or each beside itself at a level of one."""
    if workload.concurrency > 1:
        return plain(few, 1, True)
    doubled = plain([prompt for prompt in few for _ in range(2)], 2, True)
    margins = None if doubled.margins is None else doubled.margins[::2]
    return Reference(doubled.tokens[::2], margins)
