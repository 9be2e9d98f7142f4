"""S4 and S5: what does not fit, or is owned already, is refused before a page is claimed or a message sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvxfer.errors import (
    CapacityError,
    Closed,
    DuplicateRequest,
    GeometryError,
    IncompatiblePool,
    OwnershipError,
    PeerRestarted,
)
from kvxfer.geometry import Group, PoolGeometry
from kvxfer.ledger import PageState
from kvxfer.protocol import actions as act
from kvxfer.protocol import messages as msg
from kvxfer.protocol.config import DecodeConfig


def assert_untouched(world: Any) -> None:
    """Nothing was claimed, nothing was sent."""
    assert world.ledger.counts()[PageState.FREE] == 64
    assert world.sent(msg.Reserve) == [] and world.all(act.OpenLeg) == []
    assert world.core.next_deadline() is None or world.all(act.OpenSocket)


# ---- S4 --------------------------------------------------------------------------------------------------------------


def test_a_request_longer_than_our_pool_is_refused_with_both_numbers(world: Any) -> None:
    with pytest.raises(CapacityError) as refused:
        world.reserve([5], logical=[64], tokens=65 * 16)
    assert (refused.value.details["needed_tokens"], refused.value.details["available_tokens"]) == (1040, 1024)
    assert_untouched(world)
    assert world.log == []


def test_more_pages_than_the_group_has_are_refused_with_both_numbers(world: Any) -> None:
    with pytest.raises(CapacityError) as refused:
        world.reserve(range(65), tokens=1024)
    assert (refused.value.details["needed_pages"], refused.value.details["available_pages"]) == (65, 64)
    assert world.log == []


def test_a_request_longer_than_prefills_pool_fails_before_it_is_offered(make_world: Any, make_geometry: Any) -> None:
    world = make_world(peer_pools={"p0:1": make_geometry(pages=2)})
    reservation = world.reserve([5, 6, 7])
    error = world.error(reservation)
    assert isinstance(error, CapacityError)
    assert (error.details["needed_tokens"], error.details["available_tokens"]) == (48, 32)
    assert world.events(reservation) == ["failed", "released"]
    assert_untouched(world)


def test_once_prefills_capacity_is_known_a_longer_request_is_refused_at_the_call(
    make_world: Any, make_geometry: Any
) -> None:
    world = make_world(peer_pools={"p0:1": make_geometry(pages=2)})
    world.hand_over(world.reserve([5]))
    with pytest.raises(CapacityError):
        world.reserve([5, 6, 7])
    assert len(world.sent(msg.Reserve)) == 1


def test_a_peer_that_cannot_hold_one_full_context_is_refused_with_both_numbers(
    make_world: Any, make_geometry: Any
) -> None:
    small = {"p0:1": make_geometry(pages=8)}
    world = make_world(DecodeConfig(max_context_tokens=1000), peer_pools=small)
    reservation = world.reserve([5])
    error = world.error(reservation)
    assert isinstance(error, CapacityError)
    assert (error.details["needed_tokens"], error.details["available_tokens"]) == (1000, 128)
    assert world.all(act.ConnectLanes) == []
    assert_untouched(world)

    accepting = make_world(DecodeConfig(max_context_tokens=1000, accept_smaller_capacity=True), peer_pools=small)
    assert accepting.core.state(accepting.reserve([5])) == "offered"


def test_our_own_pool_must_hold_one_full_context(make_world: Any) -> None:
    with pytest.raises(CapacityError) as refused:
        make_world(DecodeConfig(max_context_tokens=1025))
    assert (refused.value.details["needed_tokens"], refused.value.details["available_tokens"]) == (1025, 1024)
    make_world(DecodeConfig(max_context_tokens=1025, accept_smaller_capacity=True))


def test_prefills_refusal_for_capacity_keeps_its_numbers(world: Any) -> None:
    reservation = world.reserve([5])
    numbers = {"needed_pages": 3, "available_pages": 2}
    world.say(world.session(), msg.Rejected(reservation, 0, "capacity", "too long", numbers, (0, 0)))
    error = world.error(reservation)
    assert isinstance(error, CapacityError)
    assert numbers.items() <= error.details.items()


def test_a_pool_that_no_plan_covers_is_refused_with_the_field(make_world: Any, make_geometry: Any) -> None:
    world = make_world()

    def partial(decode: PoolGeometry, prefills: Any) -> Any:
        return [full[:1] for full in world_plan(decode, prefills)]

    world_plan, world.core._plan = world.core._plan, partial
    reservation = world.reserve([5])
    error = world.error(reservation)
    assert isinstance(error, IncompatiblePool)
    assert error.details["field"] == "kv.layer1"
    assert_untouched(world)


# ---- S5 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["reserved", "quarantined"])
def test_a_page_of_a_live_or_quarantined_reservation_cannot_be_reserved(world: Any, state: str) -> None:
    world.held.add(act.Revoke)
    first = world.reserve([5, 6])
    if state == "quarantined":
        world.abort(first)
    before = len(world.log)
    with pytest.raises(OwnershipError) as refused:
        world.reserve([6, 7], request_id="r2")
    assert refused.value.details["page"] == 6
    assert len(world.log) == before
    assert world.page_states(7) == {PageState.FREE}
    world.reserve([7], request_id="r2")  # the refused call has left nothing behind, its request id neither


def test_a_page_named_twice_is_refused(world: Any) -> None:
    with pytest.raises(GeometryError):
        world.reserve([5, 5])
    assert world.log == []


def test_overlaid_groups_cannot_claim_one_page_twice(make_world: Any, make_geometry: Any) -> None:
    group = make_geometry().groups[0]
    overlaid = PoolGeometry(
        (group, Group("window", 16, 64, group.regions, id_space=0)), capacity_tokens=1024
    )  # fmt: skip
    world = make_world(pool=overlaid)
    pages = np.array([5], np.uint64)
    with pytest.raises(OwnershipError):
        world.core.reserve(
            world.now,
            request_id="r",
            pages={0: (np.array([0], np.uint64), pages, None, 16), 1: (np.array([0], np.uint64), pages, None, None)},
            prefill=["p0:1"],
            timeout_s=1.0,
        )
    assert world.ledger.counts()[PageState.RESERVED] == 0


def test_the_same_request_id_twice_is_refused_and_leaves_the_first_alone(world: Any) -> None:
    first = world.reserve([5])
    with pytest.raises(DuplicateRequest) as refused:
        world.reserve([6])
    assert refused.value.reservation == first
    assert world.page_states(6) == {PageState.FREE}
    world.hand_over(first)
    assert world.events(first) == ["ready"]


def test_a_request_may_be_retried_as_soon_as_it_has_failed(world: Any) -> None:
    world.held.add(act.Revoke)
    first = world.reserve([5])
    world.abort(first)
    second = world.reserve([6])
    assert world.core.state(second) == "offered"
    numbers = [m.number for m in world.sent(msg.Reserve)]
    assert numbers[1] > numbers[0]


# ---- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"pages": [64]},
        {"pages": [5, 6], "logical": [1, 0], "tokens": 32},
        {"pages": [5, 6], "logical": [0], "tokens": 32},
        {"pages": [5], "logical": [1], "tokens": 16},
        {"pages": [5], "logical": [0], "tokens": 32, "first_token": 16},
        {"pages": [5], "request_id": ""},
        {"pages": [5], "prefill": []},
        {"pages": [5], "prefill": "p0:1"},
        {"pages": [5], "prefill": ["p0:1", "p0:1"]},
        {"pages": [5], "timeout_s": 0.0},
        {"pages": [5], "timeout_s": float("nan")},
        {"pages": [5], "rank": 1, "readers": 1},
        {"pages": [5], "incarnation": [b"a" * 8, b"b" * 8]},
    ],
)
def test_senseless_arguments_are_refused_locally(world: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(GeometryError):
        world.reserve(**arguments)
    assert world.log == []
    assert_untouched(world)


def test_groups_that_end_at_different_tokens_are_refused(make_world: Any, make_geometry: Any) -> None:
    world = make_world(pool=make_geometry(groups=("a", "b")))
    one = np.array([0], np.uint64)
    for ends in ((16, 15), (None, None)):
        with pytest.raises(GeometryError):
            world.core.reserve(
                world.now,
                request_id="r",
                pages={0: (one, one, None, ends[0]), 1: (one, one, None, ends[1])},
                prefill=["p0:1"],
                timeout_s=1.0,
            )


def test_a_group_without_n_tokens_inherits_the_end(make_world: Any, make_geometry: Any) -> None:
    world = make_world(pool=make_geometry(groups=("a", "b")))
    logical = np.array([1], np.uint64)
    _, actions = world.core.reserve(
        world.now,
        request_id="r",
        pages={
            0: (logical, np.array([3], np.uint64), 16, 10),
            1: (logical, np.array([4], np.uint64), None, None),
        },
        prefill=["p0:1"],
        timeout_s=1.0,
    )
    world.carry_out(actions)
    (reserve,) = world.sent(msg.Reserve)
    assert [(g.first_token, g.n_tokens) for g in reserve.groups] == [(16, 10), (16, 10)]


def test_a_known_restart_is_refused_at_the_call(world: Any) -> None:
    world.reserve([5])
    with pytest.raises(PeerRestarted):
        world.reserve([6], request_id="r2", incarnation=b"another!")
    assert world.page_states(6) == {PageState.FREE}


def test_after_close_nothing_can_be_reserved_or_declined(world: Any) -> None:
    world.carry_out(world.core.close(world.now, "done"))
    assert world.core.is_closed
    with pytest.raises(Closed):
        world.reserve([5])
    with pytest.raises(Closed):
        world.core.decline(world.now, "r", ["p0:1"], "hit")
    assert world.core.close(world.now, "again") == []
