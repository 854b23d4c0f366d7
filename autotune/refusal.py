"""Why a study ends without a baseline, and what its user can do about it."""

from autotune.errors import AutotuneError, UserError
from autotune.records import Failure


def without_baseline(failure: Failure) -> AutotuneError:
    """The error of a study whose baseline failed: nothing could be compared with anything."""
    text = f"the baseline can't be measured: {failure.kind} at {failure.stage}: "
    kind = UserError if failure.kind == "invalid" else AutotuneError
    return kind(text + failure.message + _way_out(failure))


def _way_out(failure: Failure) -> str:
    """What a user can do about a failed baseline, and the last words of its log."""
    ways = {
        "oom": "; lower workload.concurrency, input_len or output_len, or spread over more ranks",
        "hang": "; backend.args.timeout_s is how long a silent worker is waited for",
    }
    lines = [" ".join(line.split()) for line in failure.log_tail.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    told = not last or last[:60] in failure.message or failure.message[-60:] in last
    return ways.get(failure.kind, "") + ("" if told else f"; its log ends: {last[-200:]}")
