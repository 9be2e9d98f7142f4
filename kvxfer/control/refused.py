"""What a control socket refused."""

from __future__ import annotations

from typing import NamedTuple


class Refused(NamedTuple):
    """A frame or peer that was refused and changed nothing. ``kind``: oversize, header, version, unknown, malformed,
    parts, unauthorised, handshake."""

    kind: str
    route: bytes
    detail: str
