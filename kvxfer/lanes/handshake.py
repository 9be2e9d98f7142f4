"""How a lane's connection is proven, before anything of it is believed.

The secret (32 bytes, one for each session and generation) came over the control plane. Frames are of fixed size, in
this order; prefill listens, decode dials::

    prefill -> decode   Challenge   magic, version, prefill's nonce
    decode -> prefill   Proof       magic, version, kind, epoch, generation, lane, flags, decode's nonce, MAC of decode
    prefill -> decode   Accept      MAC of prefill; on a local lane, if asked for, the description of its memory follows
    decode -> prefill   Go          decode takes the lane; only then does prefill hand it to its core

Both MACs are HMAC-SHA256 over the role, all that Proof says, and both nonces: neither can be replayed, nor sent back to
its maker. Until Proof holds, prefill says nothing but a random number, and keeps nothing but one fixed buffer. Without
Go a decode that finds the peer's memory unreadable could not fall back to another kind of lane in the same generation.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from kvxfer.errors import ProtocolViolation
from kvxfer.lanes.contract import LOCAL, TCP

VERSION = 1
NONCE_BYTES = 32
SECRET_BYTES = 32
_MAGIC = b"KVXL"
_CHALLENGE = struct.Struct(f"<4sHH{NONCE_BYTES}s")
_CLAIM = struct.Struct(f"<4sHH16sIII{NONCE_BYTES}s")
_KIND_NUMBERS = {TCP: 1, LOCAL: 2}
_KINDS = {number: kind for kind, number in _KIND_NUMBERS.items()}
_WANT_MEMORY = 1
MAC_BYTES = hashlib.sha256().digest_size
CHALLENGE_BYTES = _CHALLENGE.size
PROOF_BYTES = _CLAIM.size + MAC_BYTES
ACCEPT_BYTES = MAC_BYTES
GO = b"KVXG"


@dataclass(frozen=True, slots=True)
class Claim:
    """What decode says a connection is. ``want_memory``: the description of prefill's memory shall follow Accept."""

    kind: str
    epoch: bytes  # 16 bytes
    generation: int
    lane: int
    nonce: bytes  # decode's, 32 bytes
    want_memory: bool = False

    def pack(self) -> bytes:
        flags = _WANT_MEMORY if self.want_memory else 0
        number = _KIND_NUMBERS[self.kind]
        return _CLAIM.pack(_MAGIC, VERSION, number, self.epoch, self.generation, self.lane, flags, self.nonce)


def pack_challenge(nonce: bytes) -> bytes:
    return _CHALLENGE.pack(_MAGIC, VERSION, 0, nonce)


def parse_challenge(frame: bytes) -> bytes:
    """Prefill's nonce. Raises ProtocolViolation if this is no lane of ours."""
    magic, version, zero, nonce = _CHALLENGE.unpack(frame)
    if magic != _MAGIC or zero:
        raise ProtocolViolation("the peer does not answer as a lane", kind="framing")
    if version != VERSION:
        raise ProtocolViolation(
            "the peer speaks another version of lanes", kind="version", ours=VERSION, theirs=version
        )
    return bytes(nonce)


def pack_proof(secret: bytes, claim: Claim, server_nonce: bytes) -> bytes:
    body = claim.pack()
    return body + _mac(secret, b"decode", body, server_nonce)


def parse_proof(frame: bytes) -> tuple[Claim, bytes]:
    """The claim and the MAC that shall prove it; nothing is proven yet. Raises ProtocolViolation if it is malformed."""
    magic, version, number, epoch, generation, lane, flags, nonce = _CLAIM.unpack_from(frame)
    kind = _KINDS.get(number)
    if magic != _MAGIC or version != VERSION or kind is None or flags & ~_WANT_MEMORY:
        raise ProtocolViolation("the frame is no proof of a lane", kind="framing")
    claim = Claim(kind, bytes(epoch), generation, lane, bytes(nonce), bool(flags & _WANT_MEMORY))
    return claim, bytes(frame[_CLAIM.size :])


def proves(secret: bytes, claim: Claim, server_nonce: bytes, mac: bytes) -> bool:
    """True if ``mac`` was made by a decode that knows the secret, for this very connection."""
    return hmac.compare_digest(mac, _mac(secret, b"decode", claim.pack(), server_nonce))


def pack_accept(secret: bytes, claim: Claim, server_nonce: bytes) -> bytes:
    return _mac(secret, b"prefill", claim.pack(), server_nonce)


def accepts(secret: bytes, claim: Claim, server_nonce: bytes, mac: bytes) -> bool:
    """True if ``mac`` was made by a prefill that knows the secret, for this very connection."""
    return hmac.compare_digest(mac, pack_accept(secret, claim, server_nonce))


def _mac(secret: bytes, role: bytes, body: bytes, server_nonce: bytes) -> bytes:
    return hmac.digest(secret, b"kvxfer lane " + role + b"\0" + body + server_nonce, "sha256")
