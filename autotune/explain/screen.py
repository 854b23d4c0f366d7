"""The console of explain and diff: 100 columns when nobody watches, texts taken literally."""

from rich.console import Console

from autotune.screen import PROSE_WIDTH, console


def report_screen() -> Console:
    """Text of servers holds brackets: no markup, styles are given by argument."""
    return console(width=PROSE_WIDTH, markup=False)
