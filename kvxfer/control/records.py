"""Tables from a dataclass to the fields that travel, in the order in which they travel."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

from kvxfer.control.fields import Field, malformed
from kvxfer.control.limits import Limits


class RecordTable:
    """Turns instances of one dataclass into a list of plain values and back. Immutable, thread-safe.

    The fields are given by name and must be all of the dataclass's, in its order: a field added there without saying
    how it travels fails at import.
    """

    __slots__ = ("_dumps", "_get", "_loads", "name", "record")

    def __init__(self, record: type, **fields: Callable[[str], Field]) -> None:
        names = tuple(field.name for field in dataclasses.fields(record))
        if names != tuple(fields):
            raise TypeError(f"{record.__name__} has the fields {names}, its table says {tuple(fields)}")
        self.record = record
        self.name = record.__name__
        made = [make(f"{record.__name__}.{name}") for name, make in fields.items()]
        self._loads = tuple(field.load for field in made)
        self._dumps = tuple((index, field.dump) for index, field in enumerate(made) if field.dump is not None)
        get = operator.attrgetter(*names)
        self._get: Callable[[Any], tuple[Any, ...]] = get if len(names) > 1 else lambda value: (get(value),)

    def dump(self, value: Any) -> list[Any]:
        plain = list(self._get(value))
        for index, dump in self._dumps:
            plain[index] = dump(plain[index])
        return plain

    def load(self, plain: tuple[Any, ...], limits: Limits) -> Any:
        """Raises ProtocolViolation for a missing or an extra field, or one out of its range."""
        loads = self._loads
        if len(plain) != len(loads):
            raise malformed(self.name, f"has {len(plain)} fields instead of {len(loads)}")
        return self.record(*[load(value, limits) for load, value in zip(loads, plain, strict=True)])

    def as_field(self, name: str) -> Field:
        """This record as a field of another one."""

        def load(value: Any, limits: Limits) -> Any:
            if type(value) is not tuple:
                raise malformed(name, "is not a list of fields")
            return self.load(value, limits)

        return Field(load, self.dump)
