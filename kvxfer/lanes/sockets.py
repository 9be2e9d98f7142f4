"""Sockets of lanes: their options, and who is at the other end of a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

_UCRED = struct.Struct("iII")
_SO_PEERPIDFD = 77  # Linux 6.5


def prepare_tcp(sock: socket.socket) -> None:
    """No delay for small frames; a peer whose host has gone is noticed. Buffer sizes are left to the kernel."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        option = getattr(socket, name, None)
        if option is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """``(pid, uid)`` of the process at the other end of a Unix socket, as the kernel recorded them."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid


def peer_pidfd(sock: socket.socket, pid: int) -> tuple[int, bool]:
    """A pidfd of the process at the other end, and whether the kernel vouches that it is that process.

    Where the kernel cannot give it, it is opened by pid; the pid may have been reused meanwhile, so the caller must
    then check, after the peer has proven itself, that the process lives and calls itself ``pid``. Raises OSError.
    """
    try:
        return sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD), True
    except OSError:
        return os.pidfd_open(pid), False
