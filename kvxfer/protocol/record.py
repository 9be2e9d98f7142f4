"""The commit record (native/lanes/record.hpp): what prefill puts last on each lane of a leg.

``parse`` trusts nothing: every length follows from the header and must add up to the bytes at hand, and the record's
own digest must match before any field is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvxfer.errors import ProtocolViolation

MAGIC = 0x5258564B
VERSION = 1
COMMIT = 1
PROGRESS = 2
FLAG_FOLDS = 1
FLAG_AUX = 2

_HEADER = Struct("<IHHQ16sIIIIIIQQQQQ")
_GROUP = Struct("<IIQQ")
_DIGEST = Struct("<Q")
assert _HEADER.size == 96 and _GROUP.size == 24


class TokenRange(NamedTuple):
    """Tokens ``[first_token, first_token + n_tokens)`` of one of decode's groups."""

    group: int
    first_token: int
    n_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One parsed record.

    Attributes:
        bitmap: chunks posted on this lane as an integer, bit k is chunk k.
        folds: u64 array, empty unless this is the leg's first lane under ``verify="digest"``.
        aux: None where the record carries none (an empty aux is carried as ``b""``).
        n_tokens: of the commit, counted from token 0.
    """

    kind: int
    reservation: int
    epoch: bytes
    generation: int
    leg: int
    lane: int
    n_lanes: int
    ranges: tuple[TokenRange, ...]
    n_chunks: int
    bitmap: int
    has_folds: bool
    folds: npt.NDArray[np.uint64]
    n_tokens: int
    aux: bytes | None


class Address(NamedTuple):
    """Whom a record claims to be for; not to be believed before ``parse`` accepts the record."""

    reservation: int
    generation: int
    leg: int
    lane: int


def address(data: bytes) -> Address | None:
    """The claimed address of a record, or None where not even a header is there."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data)[0] != MAGIC:
        return None
    fields = _HEADER.unpack_from(data)
    return Address(fields[3], fields[5], fields[6], fields[7])


def parse(data: bytes) -> Record:
    """Parses one record. Raises ProtocolViolation; allocates no more than the record's own size."""
    if len(data) < _HEADER.size + _DIGEST.size or len(data) % 8:
        raise ProtocolViolation("record is truncated", nbytes=len(data))
    (
        magic, version, kind, reservation, epoch, generation, leg, lane, n_lanes, n_groups, flags,
        n_chunks, n_posted, n_folds, n_tokens, aux_bytes,
    ) = _HEADER.unpack_from(data)  # fmt: skip
    if magic != MAGIC or version != VERSION or kind not in (COMMIT, PROGRESS) or flags & ~(FLAG_FOLDS | FLAG_AUX):
        raise ProtocolViolation("not a record of this version", magic=magic, version=version, kind=kind, flags=flags)
    groups_at = _HEADER.size
    bitmap_at = groups_at + n_groups * _GROUP.size
    folds_at = bitmap_at + _padded((n_chunks + 7) // 8)
    aux_at = folds_at + n_folds * 8
    digest_at = aux_at + _padded(aux_bytes)
    if digest_at + _DIGEST.size != len(data):
        raise ProtocolViolation("record's length does not follow from its header", nbytes=len(data))
    if _DIGEST.unpack_from(data, digest_at)[0] != xxhash.xxh3_64_intdigest(memoryview(data)[:digest_at]):
        raise ProtocolViolation("record's digest does not match")
    has_folds = bool(flags & FLAG_FOLDS)
    if (n_folds and not has_folds) or (aux_bytes and not flags & FLAG_AUX):
        raise ProtocolViolation("record's flags contradict its lengths", flags=flags)
    bitmap = int.from_bytes(data[bitmap_at:folds_at], "little")
    if bitmap >> n_chunks or bitmap.bit_count() != n_posted:
        raise ProtocolViolation("record's bitmap contradicts its counts", n_chunks=n_chunks, n_posted=n_posted)
    ranges: list[TokenRange] = []
    for index in range(n_groups):
        group, reserved, first_token, group_tokens = _GROUP.unpack_from(data, groups_at + index * _GROUP.size)
        if reserved or (ranges and group <= ranges[-1].group):
            raise ProtocolViolation("record's groups are not sorted and distinct", group=group)
        ranges.append(TokenRange(group, first_token, group_tokens))
    return Record(
        kind, reservation, epoch, generation, leg, lane, n_lanes, tuple(ranges), n_chunks, bitmap, has_folds,
        np.frombuffer(data, dtype="<u8", count=n_folds, offset=folds_at), n_tokens,
        bytes(data[aux_at : aux_at + aux_bytes]) if flags & FLAG_AUX else None,
    )  # fmt: skip


def build(
    *,
    reservation: int,
    epoch: bytes,
    generation: int,
    leg: int,
    lane: int,
    n_lanes: int,
    ranges: Sequence[TokenRange | tuple[int, int, int]],
    n_chunks: int,
    bitmap: int,
    n_tokens: int,
    folds: npt.NDArray[np.uint64] | None = None,
    aux: bytes | None = None,
    kind: int = COMMIT,
) -> bytes:
    """The bytes of a record as the sender's core builds them; the simulator and the tests use this."""
    flags = (FLAG_FOLDS if folds is not None else 0) | (FLAG_AUX if aux is not None else 0)
    fold_bytes = b"" if folds is None else np.ascontiguousarray(folds, dtype="<u8").tobytes()
    body = b"".join(
        (
            _HEADER.pack(
                MAGIC, VERSION, kind, reservation, epoch, generation, leg, lane, n_lanes, len(ranges), flags,
                n_chunks, bitmap.bit_count(), len(fold_bytes) // 8, n_tokens, len(aux or b""),
            ),
            *(_GROUP.pack(group, 0, first_token, group_tokens) for group, first_token, group_tokens in ranges),
            bitmap.to_bytes(_padded((n_chunks + 7) // 8), "little"),
            fold_bytes,
            (aux or b"").ljust(_padded(len(aux or b"")), b"\0"),
        )
    )  # fmt: skip
    return body + _DIGEST.pack(xxhash.xxh3_64_intdigest(body))


def _padded(nbytes: int) -> int:
    return (nbytes + 7) & ~7
