"""Builds and runs ``loopback_stream.c``: what plain TCP moves over loopback with as many connections."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType

from kvxfer.errors import KvxferError

SOURCE = Path(__file__).with_name("loopback_stream.c")
CACHED_WINDOW_BYTES = 1 << 20  # a connection's window that stays in the cache
ROUND_TIMEOUT_S = 120.0


class NoStream(KvxferError):
    """The C stream cannot be built or run here; the message says why."""


class CStream:
    """A running stream pair; each ``round()`` moves ``total_bytes`` once. Not thread-safe."""

    def __init__(self, connections: int, total_bytes: int, window_bytes: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kvxfer-stream-")
        self._total_bytes = total_bytes
        try:
            self._process = self._start(connections, total_bytes, max(connections, window_bytes))
        except BaseException:
            self._folder.cleanup()
            raise

    def _start(self, connections: int, total_bytes: int, window_bytes: int) -> subprocess.Popen[str]:
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise NoStream("no C compiler found (cc, gcc, clang): the comparison with a plain stream is left out")
        program = Path(self._folder.name) / "loopback_stream"
        build = [compiler, "-O2", "-pthread", "-o", str(program), str(SOURCE)]
        built = subprocess.run(build, capture_output=True, text=True, timeout=60, check=False)
        if built.returncode != 0:
            raise NoStream(f"{compiler} could not build {SOURCE.name}: {built.stderr.strip()[:500]}")
        command = [str(program), str(connections), str(total_bytes), str(window_bytes)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def round_seconds(self) -> float:
        """Seconds that one round took. Raises NoStream if the program gives none within a bound."""
        stdin, stdout, stderr = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None and stdout is not None and stderr is not None
        try:
            stdin.write("go\n")
            stdin.flush()
            waiting, _, _ = select.select([stdout], [], [], ROUND_TIMEOUT_S)
            answer = stdout.readline() if waiting else ""
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.kill()
            raise NoStream(f"the plain stream gave no answer: {stderr.read().strip()[:500]}")
        return float(answer)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.communicate("", timeout=10)
        self._folder.cleanup()

    def __enter__(self) -> CStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
