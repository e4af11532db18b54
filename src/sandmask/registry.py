"""Registries of algorithms, datasets and selection rules, from which lists, help and error messages are derived."""

import difflib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Generic, Protocol, TypeVar

from sandmask.errors import SandmaskError


class Named(Protocol):
    """An entry of a registry: a frozen record with a name."""

    @property
    def name(self) -> str:
        """The name it is registered and listed under."""
        ...


T = TypeVar("T", bound=Named)


def near(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` most likely stands for, or None if nothing is close.

    In this order: a choice that begins with the word, a misspelling, a choice that contains the word, a distant
    misspelling. Of several, the shortest is returned. Numbers are not misspelled.
    """
    keys = {simplified(choice): choice for choice in choices}
    wanted = simplified(word)
    if not wanted or wanted.isdecimal():
        return None
    by_length = sorted(keys, key=len)
    begun = [key for key in by_length if len(wanted) > 1 and key.startswith(wanted)]
    containing = [key for key in by_length if len(wanted) > 2 and wanted in key]
    misspelled = difflib.get_close_matches(wanted, by_length, n=1, cutoff=0.8)
    alike = difflib.get_close_matches(wanted, by_length, n=1, cutoff=0.6)
    found = [*begun, *misspelled, *containing, *alike]
    return keys[found[0]] if found else None


def closest(word: str, choices: list[str]) -> str:
    """Return a sentence that lists `choices`, after "Did you mean ...?" if one is close to `word`."""
    meant = near(word, choices)
    hint = f"Did you mean {meant!r}? " if meant is not None else ""
    return f"{hint}Choose from: {', '.join(choices)}."


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise an error for a name that is not one of the known names of a kind of things."""
    choices = list(known)
    if name not in choices:
        raise SandmaskError(f"Unknown {kind} {name!r}. {closest(name, choices)}")


def simplified(name: str) -> str:
    """Return a name as look-ups compare it: in lower case, without hyphens and underscores."""
    return name.lower().replace("-", "").replace("_", "")


def parts_of(name: str) -> tuple[str, ...]:
    """Return the names in a composition: "SAM" and "VREx" of "SAM+VREx". "ERM++" is one name, ERMPlusPlus."""
    return tuple(part.strip() for part in name.replace("++", "PlusPlus").split("+"))


def checked_parts(name: str) -> tuple[str, ...]:
    """Return the names in a composition, none of which may be missing."""
    parts = parts_of(name)
    if len(parts) > 1 and not all(parts):
        raise SandmaskError(f"{name!r} lacks a name before or after a '+'. Methods compose as in SANDMask+VREx.")
    return parts


class Registry(Mapping[str, T], Generic[T]):
    """Entries by name, in order of registration; look-up ignores case, hyphens and underscores."""

    reserved = ""  # a character that names must not contain

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._modules: dict[str, str] = {}

    def register(self, entry: T) -> T:
        """Add an entry, whose name must be new."""
        key = simplified(entry.name)
        if self.reserved and self.reserved in entry.name:
            raise SandmaskError(f"The {self.kind} name {entry.name!r} must not contain {self.reserved!r}.")
        if key in self._entries:
            taken = self._entries[key].name
            raise SandmaskError(f"The name {taken!r} is taken by another {self.kind}. Choose another name.")
        self._entries[key] = entry
        self._modules[key] = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - as in the logging module
        return entry

    def module_of(self, name: str) -> str:
        """The name of the module that registered an entry, such as `__main__` for the program itself."""
        return self._modules.get(simplified(name), "")

    def __getitem__(self, name: str) -> T:
        entry = self._entries.get(simplified(name))
        if entry is None:
            raise SandmaskError(f"Unknown {self.kind} {name!r}. {closest(name, list(self))}")
        return entry

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and simplified(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return (entry.name for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)
