"""Which variables reach the server, and where the others are lost."""

from collections.abc import Mapping

from autotune.lint.pasted import Pasted


def server_environment(
    pasted: Pasted, outer: Mapping[str, str], inline: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(environment of the server, name -> wrapper that dropped it).

    ``outer`` is the calling shell's environment, ``inline`` what the server's line itself sets.
    """
    shell = {**outer, **pasted.env}
    container = pasted.container
    if container is not None and container.image_index == 0:
        # a YAML's container: what is given beside it is meant for it
        return {**shell, **container.env, **inline}, {}
    front = pasted.words
    if container is not None:
        front = (*front[: container.run_index], "true")
    lost = _dropped(front, shell)
    if container is None:
        kept = {name: value for name, value in shell.items() if name not in lost}
        return {**kept, **inline}, {name: way for name, way in lost.items() if name not in inline}
    passed = {name: shell[name] for name in container.passed if name in shell and name not in lost}
    env = {**passed, **container.env, **inline}
    how = "docker run (no -e NAME)"
    return env, {name: lost.get(name, how) for name in shell if name not in env}


def _dropped(words: tuple[str, ...], shell: Mapping[str, str]) -> dict[str, str]:
    """Names that sudo, env -i, ssh and the like do not hand on."""
    if not words or not shell:
        return {}
    from autotune.effect.launch import read_launch

    lost = read_launch(words, shell).lost
    return {name: way for name, way in lost.items() if "overwritten" not in way}
