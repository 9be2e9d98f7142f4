"""What prefill asks of a HELLO and of a RESERVE before it remembers or does anything (S4, S7). Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvxfer.errors import IncompatiblePool, ProtocolViolation
from kvxfer.geometry import PoolGeometry
from kvxfer.protocol.leg import LegLayout, SliceTable
from kvxfer.protocol.messages import PROTOCOL_VERSION, Hello, LaneOffer, Reserve
from kvxfer.protocol.prefill_config import PrefillConfig

MAX_LEGS_OF_A_RESERVATION = 1 << 16


class Refusal(Exception):
    """Why a peer is refused: becomes the REFUSE or REJECTED it is sent. ``details`` carries the numbers."""

    def __init__(self, code: str, message: str, /, **details: str | int) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details


def check_hello(
    hello: Hello,
    config: PrefillConfig,
    ours: PoolGeometry,
    incarnation: bytes,
    offers: tuple[LaneOffer, ...],
    compatible: Callable[[PoolGeometry], None],
) -> tuple[LaneOffer, ...]:
    """The lanes to offer to this decode. Raises Refusal."""
    if hello.version != PROTOCOL_VERSION:
        raise Refusal(
            "version", "the two sides speak different protocol versions", ours=PROTOCOL_VERSION, theirs=hello.version
        )
    if hello.incarnation is not None and hello.incarnation != incarnation:
        raise Refusal(
            "incarnation",
            "this prefill has restarted since the request was made; retry the request",
            ours=incarnation.hex(),
            theirs=hello.incarnation.hex(),
        )
    if hello.verify != config.verify:
        raise Refusal(
            "verify", "both sides must ask for the same verify mode by name", ours=config.verify, theirs=hello.verify
        )
    try:
        compatible(hello.pool)
    except IncompatiblePool as cause:
        details = {name: value if type(value) is int else str(value) for name, value in cause.details.items()}
        raise Refusal("incompatible_pool", cause.message, **details) from None
    if not config.accept_smaller_capacity:
        _check_context("prefill", ours.capacity_tokens, max(hello.max_context_tokens, config.max_context_tokens))
        _check_context("decode", hello.pool.capacity_tokens, config.max_context_tokens)
    shared = tuple(offer for offer in offers if offer.kind in hello.lane_kinds and offer.lanes > 0)
    if not shared:
        raise Refusal(
            "lanes",
            "no kind of lane in common",
            ours=",".join(offer.kind for offer in offers),
            theirs=",".join(hello.lane_kinds),
        )
    return shared


def _check_context(side: str, capacity: int, context: int) -> None:
    # 0: the pool has no group that is indexed by token, or the largest context was not stated.
    if capacity and context and capacity < context:
        raise Refusal(
            "capacity",
            f"{side}'s pool holds {capacity} tokens and cannot hold one full context of {context}; enlarge it, or set "
            "accept_smaller_capacity",
            needed=context,
            available=capacity,
        )


def check_reserve(
    reserve: Reserve,
    config: PrefillConfig,
    ours: PoolGeometry,
    theirs: PoolGeometry,
    slice_table: Callable[[bytes], SliceTable],
    generation: int,
    n_lanes: int,
    lanes_down: set[int],
) -> LegLayout:
    """The leg's numbering. Raises Refusal; then nothing may be kept of the RESERVE."""
    if reserve.generation != generation:
        raise Refusal(
            "generation",
            "the lanes of this generation are gone; retry on the current one",
            ours=generation,
            theirs=reserve.generation,
        )
    if reserve.verify != config.verify:
        raise Refusal("verify", "the verify mode is the session's", ours=config.verify, theirs=reserve.verify)
    _check_counts(reserve, config)
    lanes = reserve.lanes
    if not lanes or len(set(lanes)) != len(lanes) or min(lanes) < 0 or max(lanes) >= n_lanes:
        raise Refusal("geometry", "the lanes of a leg must be distinct lanes of the session", lanes=n_lanes)
    if down := lanes_down.intersection(lanes):
        raise Refusal("generation", "a lane of the leg is down; ask for new lanes", lane=min(down))
    check_capacity(reserve, ours, theirs)
    try:
        return LegLayout(theirs.groups, slice_table(reserve.slices), reserve.groups)
    except ProtocolViolation as cause:
        details = {name: value if type(value) is int else str(value) for name, value in cause.details.items()}
        raise Refusal("geometry", cause.message, **details) from None


def _check_counts(reserve: Reserve, config: PrefillConfig) -> None:
    if not 1 <= reserve.readers <= config.max_readers or not 0 <= reserve.rank < reserve.readers:
        raise Refusal(
            "readers",
            "rank and number of readers do not fit",
            rank=reserve.rank,
            readers=reserve.readers,
            most=config.max_readers,
        )
    if not 1 <= reserve.n_legs <= MAX_LEGS_OF_A_RESERVATION or not 0 <= reserve.leg < reserve.n_legs:
        raise Refusal("geometry", "leg and number of legs do not fit", leg=reserve.leg, n_legs=reserve.n_legs)
    if not (math.isfinite(reserve.deadline_s) and reserve.deadline_s > 0):
        raise Refusal("geometry", "the deadline must be a positive number of seconds")


def check_capacity(reserve: Reserve, ours: PoolGeometry, theirs: PoolGeometry) -> None:
    """S4: the request must fit prefill's pool as well, or its sources could never all be there. Raises Refusal."""
    needed: dict[int, int] = {}
    for wanted in reserve.groups:
        if not 0 <= wanted.group < len(theirs.groups):
            raise Refusal("geometry", "unknown group", group=wanted.group)
        decode_group = theirs.groups[wanted.group]
        end = wanted.first_token + wanted.n_tokens
        if decode_group.tokens_per_page and ours.capacity_tokens and end > ours.capacity_tokens:
            raise Refusal(
                "capacity",
                f"the request has {end} tokens and prefill's pool holds {ours.capacity_tokens}; use a larger prefill",
                needed=end,
                available=ours.capacity_tokens,
                group=decode_group.name,
            )
        for group in ours.groups:
            if group.name == decode_group.name:
                pages = needed[group.id_space] = needed.get(group.id_space, 0) + len(wanted.logical) // 8
                if pages > group.n_pages:
                    raise Refusal(
                        "capacity",
                        f"the request needs {pages} pages and prefill's pool has {group.n_pages}; use a larger prefill",
                        needed=pages,
                        available=group.n_pages,
                        group=group.name,
                    )
