"""Size effects said in words: "inert up to 64 KiB, harms from 0.5 MiB (2.1 x the time)"."""

from collections.abc import Sequence
from itertools import groupby

from autotune.digits import size_text
from autotune.effect.by_size import SizeEffect

_WORDS = {
    "inert": "inert",
    "helps": "helps",
    "harms": "harms",
    "unclear": "changes what runs, gain unclear,",
    "fails": "leaves NCCL nothing to run",
}


def sizes_in_words(effects: Sequence[SizeEffect]) -> str:
    """One clause per run of sizes with the same outcome."""
    parts = []
    for outcome, group in groupby(effects, key=lambda effect: effect.outcome):
        run = list(group)
        first, last = run[0].size_bytes, run[-1].size_bytes
        where = f"at {size_text(first)}"
        if first != last:
            where = f"at {size_text(first)} to {size_text(last)}"
        text = f"{_WORDS[outcome]} {where}"
        if outcome in ("helps", "harms"):
            worst = max(run, key=lambda e: abs((e.ratio or (1.0,))[0] - 1.0))
            text += f" ({_factor(worst)})"
        parts.append(text)
    return "; ".join(parts)


def _factor(effect: SizeEffect) -> str:
    assert effect.ratio is not None
    median, low, high = effect.ratio
    return (
        f"up to {median:.2f} x the time, 90 %: {low:.2f}-{high:.2f}, at "
        f"{size_text(effect.size_bytes)}: {effect.present} instead of {effect.without}"
    )
