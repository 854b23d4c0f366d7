"""What is known of a launch while its command line is taken apart, word by word."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


@dataclass
class Way:
    """The environment as far as the command line was followed, and where names were lost."""

    words: tuple[str, ...]
    env: dict[str, str]
    #: name -> what dropped or replaced it
    lost: dict[str, str] = field(default_factory=dict)
    steps: list[str] = field(default_factory=lambda: ["shell"])
    notes: list[str] = field(default_factory=list)
    #: why nothing certain can be said of the workers' environment, one clause
    unsure: str | None = None
    #: names that arrive all the same
    sure: set[str] = field(default_factory=set)
    #: value that the user asked for where a later step replaced it
    replaced: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: str, where: str | None = None) -> None:
        """A value on the way; ``where``: it replaces what the user gave, there."""
        before = self.env.get(name)
        self.env[name] = value
        if where is None or before == value:
            self.lost.pop(name, None)
        elif before is not None:
            self.replaced.setdefault(name, before)
            self.lost[name] = f"set again by {where}"

    def unset(self, name: str, where: str) -> None:
        """A name that is removed on the way."""
        if name in self.env:
            self.replaced.setdefault(name, self.env[name])
            self.lost[name] = where
            del self.env[name]

    def drop(self, where: str, kept: Mapping[str, str]) -> None:
        """Everything but ``kept`` is left behind."""
        for name, value in self.env.items():
            if name not in kept:
                self.replaced.setdefault(name, value)
                self.lost.setdefault(name, where)
        self.env = dict(kept)
