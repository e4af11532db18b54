"""Named things: algorithms, datasets, selection rules. Lists, help and error messages derive from here."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from sandmask.errors import SandmaskError


class Named(Protocol):
    """What a registry holds: a frozen record with a name."""

    @property
    def name(self) -> str:
        """The name it is registered and listed under."""
        ...


T = TypeVar("T", bound=Named)


def closest(word: str, choices: list[str]) -> str:
    """A sentence that lists `choices`, led by the likeliest one meant by `word`."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=0.5)
    hint = f"Did you mean {lowered[near[0]]!r}? " if near else ""
    return f"{hint}Choose from: {', '.join(choices)}."


class Registry(Mapping[str, T], Generic[T]):
    """Entries by name, in order of registration; look-up ignores case, hyphens and underscores."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    @staticmethod
    def _key(name: str) -> str:
        return name.lower().replace("-", "").replace("_", "")

    def register(self, entry: T) -> T:
        """Add an entry; a name that is taken is an error."""
        key = self._key(entry.name)
        if key in self._entries:
            raise SandmaskError(f"There is already {self.kind} named {self._entries[key].name!r}. Choose another name.")
        self._entries[key] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        entry = self._entries.get(self._key(name))
        if entry is None:
            raise SandmaskError(f"Unknown {self.kind} {name!r}. {closest(name, list(self))}")
        return entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._key(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
