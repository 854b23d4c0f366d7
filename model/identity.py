"""Large frozen values as keys of caches: the same object, not an equal one."""

from typing import Generic, TypeVar

T = TypeVar("T")


class ById(Generic[T]):
    """A value, hashed and compared by identity; the key keeps it alive, so that its id stays."""

    __slots__ = ("value",)

    def __init__(self, value: T) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value
