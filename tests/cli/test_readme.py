"""What the README tells a new user to paste and run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
PORT = "127.0.0.1:5555"


def examples() -> dict[str, str]:
    found = re.findall(r"Save as `(\w+\.py)`.*?```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    return dict(found)


@pytest.mark.parametrize("first", ["prefill.py", "decode.py"])
def test_the_two_examples_hand_over_in_whichever_order_they_start(tmp_path, unused_tcp_port, first):
    names = sorted(examples(), key=lambda name: name != first)
    assert len(names) == 2
    running = []
    for name in names:
        file = tmp_path / name
        file.write_text(examples()[name].replace(PORT, f"127.0.0.1:{unused_tcp_port}"))
        running.append(
            subprocess.Popen([sys.executable, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    shown = {}
    for name, process in zip(names, running, strict=True):
        out, err = process.communicate(timeout=40)
        assert (process.returncode, err) == (0, "")
        shown[name] = out
    assert shown["prefill.py"] == "handed over\n"
    assert shown["decode.py"].startswith("40 tokens, b'first token: 17' over local\n")


def test_an_example_has_about_twenty_lines():
    assert all(len(text.splitlines()) <= 22 for text in examples().values())
