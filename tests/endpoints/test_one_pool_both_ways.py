"""One pool that receives and sends at the same time: neither side may use the other's pages."""

from __future__ import annotations

from typing import Any

import pytest

from kvxfer import Pages, PrefillEndpoint
from kvxfer.errors import OwnershipError

from .conftest import at


@pytest.fixture
def back(pair: Any) -> Any:
    """A prefill endpoint over decode's own pool."""
    with PrefillEndpoint(pair.target.pool, bind="127.0.0.1:0") as endpoint:
        yield endpoint


def test_a_page_that_a_reservation_waits_for_is_not_sent_on(pair: Any, back: Any) -> None:
    pair.reserve("victim", [5], 16)
    grant = back.accept("launder", timeout_s=10)
    with pytest.raises(OwnershipError):
        grant.write({"kv": Pages([0], [5])})


def test_a_page_that_is_being_sent_is_not_reserved_until_its_release(pair: Any, back: Any) -> None:
    grant = back.accept("out", timeout_s=10)
    grant.write(at([6]))
    with pytest.raises(OwnershipError):
        pair.reserve("in", [6], 16)
    assert grant.abort("done", drain_timeout_s=10)
    pair.hand_over("in", [3], [6], 16)
