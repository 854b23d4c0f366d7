"""Names of backends and where they live.

The values are strings, so that listing or checking backends imports neither torch nor CUDA.
"""

import importlib
from collections.abc import Mapping

from autotune.backends.base import Backend, BackendContext
from autotune.errors import UserError

#: name -> "module:class"; the class takes one ``BackendContext``
BACKENDS: Mapping[str, str] = {
    "engine": "autotune.backends.engine_backend:EngineBackend",
    "replay": "autotune.backends.replay_backend:ReplayBackend",
    "sim": "autotune.backends.sim_backend:SimBackend",
}


def backend_names() -> tuple[str, ...]:
    """Known backends, sorted."""
    return tuple(sorted(BACKENDS))


def create_backend(kind: str, context: BackendContext) -> Backend:
    """Import the backend called ``kind`` and build it.

    Raises ``UserError`` for an unknown name, or when the study asks the backend for something
    that this host or the study cannot give.
    """
    try:
        module_name, _, class_name = BACKENDS[kind].partition(":")
    except KeyError:
        raise UserError(
            f"backend.kind: unknown backend {kind!r}; known: {', '.join(backend_names())}"
        ) from None
    factory = getattr(importlib.import_module(module_name), class_name)
    backend: Backend = factory(context)
    return backend
