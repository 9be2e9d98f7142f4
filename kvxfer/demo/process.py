"""A worker process that is told what to do by lines of JSON, one answer for each command."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from types import TracebackType
from typing import Any

from kvxfer.errors import DeadlineExceeded, PeerLost

END_TIMEOUT_S = 10.0


class WorkerFailed(PeerLost):
    """A worker process ended, or answered a command with an unexpected error."""


class Worker:
    """One child process running ``python -m kvxfer.demo.worker ROLE``. Not thread-safe."""

    def __init__(self, role: str) -> None:
        self.role = role
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvxfer.demo.worker", role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self._buffer = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str, **arguments: Any) -> None:
        """Sends a command; ``answer`` must follow before the next one."""
        assert self._process.stdin is not None
        line = json.dumps({"command": command, **arguments}) + "\n"
        try:
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed("ended before it could be asked") from None

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The answer to the last command. Raises WorkerFailed, or DeadlineExceeded after ``timeout_s``."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        fd = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            waiting, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            if not waiting:
                raise DeadlineExceeded(f"the {self.role} worker gave no answer", timeout_s=timeout_s)
            received = os.read(fd, 1 << 16)
            if not received:
                raise self._failed("ended")
            self._buffer += received
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "unexpected" in answer:
            raise self._failed(str(answer["unexpected"]))
        return answer

    def call(self, command: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        self.send(command, **arguments)
        return self.answer(timeout_s)

    def close(self) -> None:
        """Closes its standard input, upon which it ends; kills it if it does not."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _failed(self, what: str) -> WorkerFailed:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return WorkerFailed(f"the {self.role} worker: {what}", last_lines="\n".join(lines[-5:]))
