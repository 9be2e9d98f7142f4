"""Every test here runs on every kind of lane, over rigs that are torn down behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from .remote import Remote
from .rig import Rig

KINDS = ("local-mapped", "local-process_vm_readv", "tcp")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_rig(kind: str) -> Iterator[Callable[..., Rig]]:
    """Makes rigs of the kind under test."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(kind, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


@pytest.fixture
def make_remote(kind: str, make_rig: Callable[..., Rig]) -> Iterator[Callable[..., tuple[Rig, Remote]]]:
    """Makes rigs whose prefill is a process of its own."""
    made: list[Remote] = []

    def make(
        *, n_lanes: int = 2, n_pages: int = 128, page_bytes: int = 1 << 16, regions: int = 2
    ) -> tuple[Rig, Remote]:
        made.append(Remote(kind, n_lanes, n_pages, page_bytes, regions))
        sizes = {"n_lanes": n_lanes, "n_pages": n_pages, "page_bytes": page_bytes, "regions": regions}
        return make_rig(remote=made[-1], **sizes), made[-1]

    yield make
    for remote in made:
        remote.close()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def hostile(make_rig: Callable[..., Rig]) -> Rig:
    """A rig whose prefill is written by hand, on one lane."""
    return make_rig(hostile=True, n_lanes=1)
