"""Dials the peer described on standard input where the kernel refuses process_vm_readv; prints what came of it."""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import sys

from kvxfer.lanes.dial import connect_lanes
from kvxfer.protocol.messages import LaneOffer

SYSCALL = {"x86_64": 310, "aarch64": 270}
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
EPERM = 1


def forbid_process_vm_readv() -> None:
    """A seccomp filter, as container runtimes set it: this system call fails with EPERM."""
    program = b"".join(
        struct.pack("HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),  # load the system call's number
            (0x15, 0, 1, SYSCALL[platform.machine()]),  # if it is process_vm_readv
            (0x06, 0, 0, 0x00050000 | EPERM),  # fail
            (0x06, 0, 0, 0x7FFF0000),  # else allow
        )
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    filter_program = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_program), 0, 0
    ):
        raise OSError(ctypes.get_errno(), "seccomp is not available")


def main() -> None:
    peer = json.loads(sys.stdin.readline())
    try:
        forbid_process_vm_readv()
    except (OSError, KeyError) as cause:
        print(json.dumps({"unavailable": str(cause)}))
        return
    kind, _, reasons = connect_lanes(
        [LaneOffer(*offer) for offer in peer["offers"]],
        ("local", "tcp"),
        epoch=bytes.fromhex(peer["epoch"]),
        generation=0,
        secret=bytes.fromhex(peer["secret"]),
        timeout_s=5,
    )
    print(json.dumps({"kind": kind, "reasons": reasons}))


if __name__ == "__main__":
    main()
