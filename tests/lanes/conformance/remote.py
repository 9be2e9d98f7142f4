"""A prefill that is a process of its own."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvxfer.protocol.messages import LaneOffer

from .offers import DEADLINE_S, TOKENS_PER_PAGE, Leg


class Remote:
    """A prefill process (``prefill_worker.py``) that can be paused and killed. It writes what ``start`` says."""

    def __init__(self, kind: str, n_lanes: int, n_pages: int, page_bytes: int, regions: int) -> None:
        arguments = [kind, str(n_lanes), str(n_pages), str(page_bytes), str(regions)]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("prefill_worker.py")), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = b""
        hello = self._read()
        self.epoch, self.secret = bytes.fromhex(hello["epoch"]), bytes.fromhex(hello["secret"])
        self.offer = LaneOffer(*hello["offer"])

    def start(self, leg: Leg, *, commit: bool = True, pause_s: float = 0.0) -> None:
        """Attaches the leg, writes its pages 16 at a time with pauses between, and commits, in a thread over there."""
        order = {
            "reservation": leg.reservation,
            "leg": leg.number,
            "verify": leg.verify,
            "lanes": leg.lanes,
            "slices": leg.slices.hex(),
            "first_token": leg.first_page * TOKENS_PER_PAGE,
            "logical": leg.logical.tolist(),
            "source": leg.source.tolist(),
            "n_tokens": leg.end_token,
            "commit": commit,
            "pause_s": pause_s,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, event: str) -> None:
        """Until that process says WRITTEN, LEG_DRAINED, LEG_FAILED or LANE_DOWN."""
        while self._read()["event"] != event:
            pass

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._heard:
            ready, _, _ = select.select([fd], [], [], DEADLINE_S)
            data = os.read(fd, 4096) if ready else b""
            assert data, "the prefill process said nothing"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found
