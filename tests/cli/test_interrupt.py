"""Ctrl-C ends a run in one clear line or document, and takes the other process along without a word from it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvxfer.cli import exit_codes

WAIT_S = 20.0


def _children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in listed.read_text().split()] if listed.exists() else []


def _alive(pid: int) -> bool:
    """False for a process that has ended, also where nobody has asked for its status yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.mark.parametrize("lane", ["local", "tcp"])
def test_ctrl_c_during_a_run_prints_an_error_document_and_leaves_no_process(lane: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "kvxfer.cli", "bench", "--json", "--lane", lane, "--pages", "64", "--repeat", "10000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + WAIT_S
        while not (children := _children(run.pid)):
            assert run.poll() is None and time.monotonic() < deadline, "prefill's process was never started"
            time.sleep(0.01)
        os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to the whole group, the children included
        out, err = run.communicate(timeout=WAIT_S)
    finally:
        run.kill()
    assert run.returncode == exit_codes.INTERRUPTED
    assert json.loads(out)["error"]["kind"] == "Interrupted"
    assert err == ""
    # Interrupted while it was being started, the child ends when it finds its standard input closed.
    while any(_alive(child) for child in children):
        assert time.monotonic() < deadline, "prefill's process outlived the run"
        time.sleep(0.01)
