"""Which server a study's numbers are of: the model's priors and kernel counts differ by server."""

from collections.abc import Mapping
from pathlib import Path

from autotune.errors import UserError
from autotune.schemas import Study
from model.servers import SERVERS


def server_name(study: Study, base_dir: Path) -> str:
    """Name in ``model.servers``: the backend's, for a replay that of the recorded one.

    A recording that does not say, or cannot be read here, is of a generic server; the replay
    backend reports what is wrong with it.
    """
    kind = study.backend.kind
    if kind == "replay":
        kind = _recorded(study.backend.args, base_dir)
    return kind if kind in SERVERS else "generic"


def _recorded(args: Mapping[str, object], base_dir: Path) -> str:
    # only a replay reads a recording
    from autotune.backends.recording import read_recording
    from autotune.backends.recording_store import recording_of_study

    provenance = None
    try:
        if args.get("path") is not None:
            path = base_dir / Path(str(args["path"])).expanduser()
            provenance = read_recording(path).provenance
        elif args.get("database") is not None:
            found = recording_of_study(str(args["database"]), str(args.get("study")))
            provenance = found.provenance
    except UserError:
        return "generic"
    return "generic" if provenance is None else str(provenance.config.get("backend", "generic"))
