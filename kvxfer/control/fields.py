"""How one field of a message travels: the checks on the way in, the plain form on the way out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvxfer.control.limits import MAX_DIGESTS, MAX_REQUEST_ID_BYTES, MAX_TEXT_BYTES, Limits
from kvxfer.errors import ProtocolViolation
from kvxfer.geometry import SLICE_DTYPE

Dump = Callable[[Any], Any]
Load = Callable[[Any, Limits], Any]

U32_MAX = (1 << 32) - 1
U64_MAX = (1 << 64) - 1
SIZE_MAX = (1 << 47) - 1  # sizes stay below it, so that sums and products of a few of them fit 64 bits when checked
SECONDS_MAX = 10.0**9
MAX_DETAILS = 32
MAX_ADDRESSES = 32
MAX_OFFERS = 8


@dataclass(frozen=True, slots=True)
class Field:
    """``load`` turns what msgpack found into the field's value or raises; ``dump`` is its inverse, None: as it is."""

    load: Load
    dump: Dump | None = None


def malformed(name: str, problem: str) -> ProtocolViolation:
    return ProtocolViolation(f"{name} {problem}", kind="malformed", field=name)


def _integer(lowest: int, highest: int) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        def load(value: Any, limits: Limits) -> int:
            if type(value) is not int or not lowest <= value <= highest:
                raise malformed(name, f"is not an integer from {lowest} to {highest}")
            return value

        return Field(load)

    return make


u32 = _integer(0, U32_MAX)
u64 = _integer(0, U64_MAX)
size = _integer(0, SIZE_MAX)
lane_or_none = _integer(-1, U32_MAX)
digest_count = _integer(1, MAX_DIGESTS)
rank_count = _integer(1, 1 << 16)


def boolean(name: str) -> Field:
    def load(value: Any, limits: Limits) -> bool:
        if type(value) is not bool:
            raise malformed(name, "is not a boolean")
        return value

    return Field(load)


def seconds(name: str) -> Field:
    def load(value: Any, limits: Limits) -> float:
        if type(value) is not float or not 0.0 <= value <= SECONDS_MAX or not math.isfinite(value):
            raise malformed(name, "is not a finite number of seconds")
        return value

    return Field(load, float)


def _text(highest: int, *, cut: bool) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        def load(value: Any, limits: Limits) -> str:
            if type(value) is not str or (len(value) * 4 > highest and len(value.encode()) > highest):
                raise malformed(name, f"is not a text of at most {highest} bytes")
            return value

        def shorten(value: str) -> str:
            raw = value.encode("utf-8", "replace")
            return raw[:highest].decode("utf-8", "ignore")

        return Field(load, shorten if cut else None)

    return make


label = _text(256, cut=False)
request_id = _text(MAX_REQUEST_ID_BYTES, cut=False)
explanation = _text(MAX_TEXT_BYTES, cut=True)  # for people: cut to its bound rather than refused


def one_of(*allowed: str) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        def load(value: Any, limits: Limits) -> str:
            if type(value) is not str or value not in allowed:
                raise malformed(name, f"is not one of {', '.join(allowed)}")
            return value

        return Field(load)

    return make


def raw(n_bytes: int) -> Callable[[str], Field]:
    """Exactly ``n_bytes`` bytes."""

    def make(name: str) -> Field:
        def load(value: Any, limits: Limits) -> bytes:
            if type(value) is not bytes or len(value) != n_bytes:
                raise malformed(name, f"is not {n_bytes} bytes")
            return value

        return Field(load, bytes)

    return make


def _packed(item_bytes: int, most: Callable[[Limits], int]) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        def load(value: Any, limits: Limits) -> bytes:
            if type(value) is not bytes or len(value) % item_bytes or len(value) > item_bytes * most(limits):
                raise malformed(name, f"is not at most {most(limits)} items of {item_bytes} bytes")
            return value

        return Field(load, bytes)

    return make


packed_pages = _packed(8, lambda limits: limits.max_pages)
packed_digests = _packed(8, lambda limits: MAX_DIGESTS)
packed_slices = _packed(SLICE_DTYPE.itemsize, lambda limits: limits.max_slices)


def optional(inner: Callable[[str], Field]) -> Callable[[str], Field]:
    def make(name: str) -> Field:
        field = inner(name)
        load_inner, dump_inner = field.load, field.dump

        def load(value: Any, limits: Limits) -> Any:
            return None if value is None else load_inner(value, limits)

        def dump(value: Any) -> Any:
            return value if value is None or dump_inner is None else dump_inner(value)

        return Field(load, dump)

    return make


def several(inner: Callable[[str], Field], most: Callable[[Limits], int]) -> Callable[[str], Field]:
    """A tuple of at most ``most(limits)`` fields of one kind."""

    def make(name: str) -> Field:
        field = inner(name)
        load_inner, dump_inner = field.load, field.dump

        def load(value: Any, limits: Limits) -> tuple[Any, ...]:
            if type(value) is not tuple or len(value) > most(limits):
                raise malformed(name, f"is not a list of at most {most(limits)}")
            return tuple([load_inner(item, limits) for item in value])

        def dump(value: Any) -> Any:
            return list(value) if dump_inner is None else [dump_inner(item) for item in value]

        return Field(load, dump)

    return make


def details(name: str) -> Field:
    """A small mapping of names to numbers and texts."""
    value_field = explanation(name)
    shorten = value_field.dump
    assert shorten is not None

    def load(value: Any, limits: Limits) -> dict[str, str | int]:
        if type(value) is not dict or len(value) > MAX_DETAILS:
            raise malformed(name, f"is not a mapping of at most {MAX_DETAILS} entries")
        for key, item in value.items():
            if type(key) is not str or len(key) > 64:
                raise malformed(name, "has a key that is not a short text")
            if type(item) is int:
                if not -U64_MAX <= item <= U64_MAX:
                    raise malformed(name, "has a number beyond 64 bits")
            else:
                value_field.load(item, limits)
        return value

    def dump(value: dict[str, str | int]) -> dict[str, str | int]:
        plain: dict[str, str | int] = {}
        for key, item in list(value.items())[:MAX_DETAILS]:
            whole = type(item) is int and -(1 << 63) <= item <= U64_MAX
            plain[str(key)[:64]] = item if whole else shorten(str(item))
        return plain

    return Field(load, dump)
