"""Frames and records that no honest peer sends: forged with the right epoch and number, or replayed.

Left out are the lies that no receiver can see through, and that the design names as its limits: an authenticated
prefill
that says QUIESCED of what it has not drained.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvxfer.protocol import messages as m
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.decode_node import DecodeNode
    from kvxfer.sim.prefill_node import PrefillNode


def forge(world: World, decode: DecodeNode, prefill: PrefillNode) -> None:
    """One forged or repeated frame or record between the two, if they know each other."""
    dice = world.chance("forge")
    network = world.network
    what = dice.random()
    if what < 0.25 and network.recent:
        world.counts["frames replayed"] += 1
        dice.choice(list(network.recent))()
    elif what < 0.5:
        _record(world, dice, decode, prefill)
    else:
        links = [link for link in decode.links.values() if link.peer == prefill.name]
        if not links:
            return
        to_prefill = what < 0.75
        known = network.last.get((links[-1].route, to_prefill))
        if known is None:
            return
        epoch, sequence = known
        number = sequence + dice.choice([1, 1, 3])
        # On verbs nobody but decode itself can vouch for the pages that it names, so it does not lie about those.
        reserves = [r for its, r in network.reserves if its == epoch or world.plan.lane_kind != "verbs"]
        reserve = dice.choice(reserves) if reserves else None
        world.counts["frames forged"] += 1
        if to_prefill:
            prefill.frame(links[-1].route, epoch, number, _for_prefill(dice, reserve))
        else:
            session = next(session for session, link in decode.links.items() if link is links[-1])
            decode.frame(session, epoch, number, _for_decode(dice, reserve))


def _record(world: World, dice: random.Random, decode: DecodeNode, prefill: PrefillNode) -> None:
    """A record again, on any lane of any generation, or damaged, or a refused frame."""
    groups = [group for group in world.groups.values() if group.decode is decode and group.prefill is prefill]
    if not groups:
        return
    group = dice.choice(groups)
    lane = dice.randrange(len(group.lanes))
    world.counts["records forged"] += 1
    if dice.random() < 0.2:
        reservation = dice.choice(list(decode.memory.claims) or [7])
        decode.violation(group, lane, reservation, dice.randrange(2), "bounds: forged")
        return
    data = dice.choice(list(decode.receiver.recent) or [b"KVXR"])
    if dice.random() < 0.4 and data:
        data = data[: dice.randrange(len(data))] + dice.randbytes(dice.randrange(9))
    decode.record(group, lane, data, 0)


def _for_prefill(dice: random.Random, reserve: m.Reserve | None) -> m.Message:
    reservation, number, leg = (reserve.reservation, reserve.number, reserve.leg) if reserve else (7, 0, 0)
    forged: list[Callable[[], m.Message]] = [
        lambda: m.Ping(dice.getrandbits(32)),
        lambda: m.Pong(dice.getrandbits(32)),
        lambda: m.Done(reservation, leg),
        lambda: m.Done(dice.getrandbits(64), 0),
        lambda: m.Abort(reservation, number + dice.randrange(-1, 4), leg, "r1", "forged"),
        lambda: m.Abort(dice.getrandbits(64), dice.randrange(50), 0, "r1", "forged"),
        lambda: m.Relane(dice.randrange(5)),
        lambda: m.FetchDigests(reservation, leg, dice.randrange(-2, 20), dice.randrange(-2, 200)),
        lambda: m.Decline(f"r{dice.randrange(1, 9)}", "forged", dice.randrange(3)),
        lambda: m.Bye("forged"),
        lambda: m.Granted(reservation, leg),
    ]
    if reserve is not None:
        forged += [lambda: reserve, lambda: _broken(dice, reserve)] * 2
    return dice.choice(forged)()


def _broken(dice: random.Random, reserve: m.Reserve) -> m.Reserve:
    """A RESERVE of a new reservation that cannot be served."""
    fresh = replace(reserve, reservation=dice.getrandbits(64), number=reserve.number + dice.randrange(1, 5))
    groups = fresh.groups
    changes = [
        {"generation": reserve.generation + 1},
        {"lanes": (0, 0)},
        {"lanes": ()},
        {"lanes": (99,)},
        {"rank": 5},
        {"leg": 9},
        {"deadline_s": -1.0},
        {"deadline_s": float("nan")},
        {"slices": reserve.slices[:-1] if reserve.slices else b"x"},
        {"groups": groups[::-1] if len(groups) > 1 else groups + groups},
        {"groups": (replace(groups[0], logical=groups[0].logical + b"\xff" * 8),) + groups[1:]},
        {"groups": (replace(groups[0], pool_pages=groups[0].pool_pages[:-8] + b"\xff" * 8),) + groups[1:]},
        {"groups": (replace(groups[0], n_tokens=1 << 60),) + groups[1:]},
        {"verify": "none"},
    ]
    return replace(fresh, **dice.choice(changes))  # type: ignore[arg-type]


def _for_decode(dice: random.Random, reserve: m.Reserve | None) -> m.Message:
    reservation, leg = (reserve.reservation, reserve.leg) if reserve else (7, 0)
    generation = reserve.generation if reserve else 1
    cause = dice.choice(["lane", "source_changed", "aborted", "rejected", "timeout", "?"])
    forged: list[Callable[[], m.Message]] = [
        lambda: m.Ping(dice.getrandbits(32)),
        lambda: m.Pong(dice.getrandbits(32)),
        lambda: m.Granted(reservation, leg),
        lambda: m.Granted(reservation, 9),
        lambda: m.Rejected(
            reservation, leg, dice.choice(["busy", "capacity", "?"]), "forged", {"reservation": 1}, (9,)
        ),
        lambda: m.Failed(reservation, leg, dice.randrange(-1, 3), generation + dice.randrange(2), cause, "forged"),
        lambda: m.Failed(dice.getrandbits(64), 0, 0, 1, cause, "forged"),
        lambda: m.Quiesced(dice.getrandbits(64), 0, (0,)),
        lambda: m.Digests(reservation, leg, 0, dice.randbytes(8 * dice.randrange(4) + dice.randrange(2))),
        lambda: m.Lanes(dice.randrange(4), dice.randbytes(dice.choice([0, 32]))),
        lambda: m.Refuse(dice.choice(["unknown_epoch", "closed", "busy"]), "forged", {"needed": 1}),
        lambda: m.Bye("forged"),
        lambda: m.Done(reservation, leg),
    ]
    return dice.choice(forged)()
