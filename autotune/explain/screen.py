"""The console of explain and diff: 100 columns when nobody watches, texts taken literally."""

from rich.console import Console

_WIDTH = 100


def report_screen() -> Console:
    """Text of servers holds brackets: no markup, styles are given by argument."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, markup=False, width=_WIDTH)
