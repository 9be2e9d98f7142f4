"""A pool's geometry as bytes.

It is the one part of a message whose lists may be long, so it travels as a byte string of its own, read list by
list: each length is checked against its bound before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack

from kvxfer.control.fields import Field, boolean, label, malformed, optional, size, u32
from kvxfer.control.limits import Limits
from kvxfer.control.records import RecordTable
from kvxfer.errors import ProtocolViolation
from kvxfer.geometry import Group, PoolGeometry, Region


def _travels_apart(name: str) -> Field:
    def load(value: Any, limits: Limits) -> Any:
        return value

    return Field(load)


_REGION = RecordTable(
    Region,
    layer=label,
    dtype=label,
    page_bytes=size,
    page_stride=size,
    runs=u32,
    units=u32,
    unit_bytes=size,
    token_rows=u32,
    token_bytes=size,
)
_GROUP = RecordTable(
    Group,
    name=label,
    tokens_per_page=u32,
    n_pages=size,
    regions=_travels_apart,
    id_space=u32,
    layout=label,
    replicated=boolean,
    window=optional(size),
    shard_start=u32,
    shard_stop=u32,
    shard_total=u32,
)
_POOL = RecordTable(PoolGeometry, groups=_travels_apart, capacity_tokens=size, fingerprint=label)
_REGION_FIELDS, _GROUP_FIELDS = len(fields(Region)), len(fields(Group))


def dump_geometry(geometry: PoolGeometry) -> bytes:
    pool = _POOL.dump(geometry)
    groups = []
    for group in geometry.groups:
        plain = _GROUP.dump(group)
        plain[3] = [_REGION.dump(region) for region in group.regions]
        groups.append(plain)
    pool[0] = groups
    packed: bytes = msgpack.packb(pool)
    return packed


def load_geometry(data: bytes, limits: Limits) -> PoolGeometry:
    """Raises ProtocolViolation for anything but one well-formed geometry within ``limits``."""
    unpacker = msgpack.Unpacker(
        raw=False,
        max_buffer_size=len(data) or 1,
        max_str_len=1024,
        max_bin_len=0,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    unpacker.feed(data)
    reader = _Reader(unpacker, limits)
    try:
        reader.expect(3, "PoolGeometry")
        groups = reader.several(limits.max_groups, "groups", lambda: _read_group(reader))
        geometry: PoolGeometry = _POOL.load((groups, reader.scalar(), reader.scalar()), limits)
    except ProtocolViolation:
        raise
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as cause:
        raise malformed("PoolGeometry", f"cannot be read: {cause}") from cause
    if unpacker.tell() != len(data):
        raise malformed("PoolGeometry", "is followed by further bytes")
    return geometry


class _Reader:
    """Reads lists whose length was checked, and scalars; everything that is not expected raises."""

    def __init__(self, unpacker: Any, limits: Limits) -> None:
        self._unpacker = unpacker
        self.limits = limits
        self.regions_left = limits.max_regions

    def expect(self, length: int, name: str) -> None:
        found = self._unpacker.read_array_header()
        if found != length:
            raise malformed(name, f"has {found} fields instead of {length}")

    def several(self, most: int, name: str, read: Callable[[], Any]) -> tuple[Any, ...]:
        length = self._unpacker.read_array_header()
        if length > most:
            raise malformed(name, f"has {length} items, more than {most}")
        return tuple([read() for _ in range(length)])

    def scalar(self) -> Any:
        return self._unpacker.unpack()


def _read_group(reader: _Reader) -> Group:
    reader.expect(_GROUP_FIELDS, "Group")
    head = [reader.scalar() for _ in range(3)]
    regions = reader.several(reader.regions_left, "regions", lambda: _read_region(reader))
    reader.regions_left -= len(regions)
    tail = [reader.scalar() for _ in range(_GROUP_FIELDS - 4)]
    group: Group = _GROUP.load((*head, regions, *tail), reader.limits)
    return group


def _read_region(reader: _Reader) -> Region:
    reader.expect(_REGION_FIELDS, "Region")
    region: Region = _REGION.load(tuple([reader.scalar() for _ in range(_REGION_FIELDS)]), reader.limits)
    return region


def geometry(name: str) -> Field:
    """A pool's geometry as a field of a message."""

    def load(value: Any, limits: Limits) -> PoolGeometry:
        if type(value) is not bytes or len(value) > limits.max_geometry_bytes:
            raise malformed(name, f"is not a geometry of at most {limits.max_geometry_bytes} bytes")
        return load_geometry(value, limits)

    return Field(load, dump_geometry)
