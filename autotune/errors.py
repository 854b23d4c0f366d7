"""Errors that end a command with one clear line instead of a traceback."""

from collections.abc import Sequence


class AutotuneError(Exception):
    """Something failed that the user did not do wrong. Exit code 1.

    The message is one line that names the value, the place and the way out.
    """

    exit_code = 1


class UserError(AutotuneError):
    """A mistake in what the user gave us. Exit code 2; several problems make several lines."""

    exit_code = 2

    @classmethod
    def of_problems(cls, problems: Sequence[str]) -> "UserError":
        """One error out of ``problems``, one line each."""
        return cls("\n".join(problems))
