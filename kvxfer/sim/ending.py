"""What must hold when nothing is under way any more, and at the very end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvxfer.sim.decode_node import DecodeNode
from kvxfer.sim.prefill_node import PrefillNode
from kvxfer.sim.scenario import HONEST
from kvxfer.sim.violation import Violation
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.workload import Workload


def quiet(world: World) -> bool:
    """No reservation and no grant is under way."""
    for node in world.nodes.values():
        if isinstance(node, DecodeNode):
            if node.engine.handoffs:
                return False
        elif isinstance(node, PrefillNode) and any(_due_to_end(node)):
            return False
    return True


def _due_to_end(node: PrefillNode) -> list[int]:
    """Grants that must end by themselves: a grant that the engine does not commit waits for the engine."""
    return [
        number
        for number in {**node.core._grants.live, **node.grants}
        if number not in node.grants
        or node.grants[number].commit is not None
        or node.core.state(number) not in ("offered", "writing")
    ]


def check_ended(world: World) -> None:
    """S6, S5: every reservation and grant has ended, every page is accounted for, nothing is kept of what is over."""
    for node in world.nodes.values():
        if isinstance(node, DecodeNode):
            _decode_ended(node)
        elif isinstance(node, PrefillNode):
            _prefill_ended(node)


def _decode_ended(node: DecodeNode) -> None:
    for reservation, handoff in node.engine.handoffs.items():
        state = "failed, and its pages do not come back" if handoff.failed else "live"
        raise Violation("S6-endless", f"{node.name}: {reservation:x} is {state}: {_states(node, reservation)}")
    node.check()
    node.engine.check_pages()
    if node.receiver.legs:
        raise Violation("S6-memory", f"{node.name}: {len(node.receiver.legs)} legs outlive their reservations")
    core = node.core
    if core.outstanding() or core._live_requests:
        raise Violation("S6-memory", f"{node.name}: the core keeps reservations that are over")
    for session in core._sessions.values():
        if session.legs or session.waiting:
            raise Violation("S6-memory", f"{node.name}: session {session.id} keeps legs that are over")


def _states(node: DecodeNode, reservation: int) -> str:
    found = node.core._reservations.get(reservation)
    if found is None:
        return "the core does not know it"
    legs = [
        f"leg {leg.index}: closed={leg.closed} revoke_asked={leg.revoke_asked} posted={leg.posted} "
        f"records={sorted(leg.records)} session {leg.session.state}/{leg.session.lanes_state}"
        for leg in found.legs
    ]
    return f"{found.state}; " + "; ".join(legs)


def _prefill_ended(node: PrefillNode) -> None:
    for number in _due_to_end(node):
        raise Violation(
            "S6-endless", f"{node.name}: grant {number} is {node.core.state(number)}: {node.core.outstanding()}"
        )


def check_fair(world: World, workload: Workload) -> None:
    """Whoever was not disturbed has succeeded, at every reader and every rank of the prefill."""
    plan = world.plan
    if not plan.fair and (plan.lane_kind == "verbs" or plan.hasty):
        return  # a fence costs neighbours, and who is in a hurry may be too late
    repeated = {
        one.request_id for one in plan.requests if sum(r.request_id == one.request_id for r in plan.requests) > 1
    }
    for request in plan.requests:
        nodes = {f"decode{n}" for n in request.decodes} | {f"prefill{request.prefill}.{r}" for r in range(plan.ranks)}
        if request.serial not in workload.begun or request.serial in workload.excused or request.kind != HONEST:
            continue
        if nodes & plan.disturbed or request.request_id in repeated:
            continue
        if not plan.fair and min(request.reserve_timeout_s, request.accept_timeout_s) < 60.0:
            continue
        ready = workload.succeeded.get(request.serial, set())
        if len(ready) < len(request.decodes):
            why = workload.why.get(request.serial, "no error")
            raise Violation(
                "fair", f"{request.request_id}: READY at {sorted(ready)} of {len(request.decodes)} readers: {why}"
            )
        if not plan.weather.ordered:
            continue  # a lost DONE leaves prefill in doubt, and is not said again
        sent = workload.delivered.get(request.serial, set())
        if len(sent) < plan.ranks:
            why = workload.why.get(request.serial, "no error")
            raise Violation("fair", f"{request.request_id}: delivered by {sorted(sent)} of {plan.ranks} ranks: {why}")


def check_closed(world: World) -> None:
    """S6: close() ends, on both sides, and nothing is left."""
    for node in world.nodes.values():
        assert isinstance(node, (DecodeNode, PrefillNode))
        if not node.core.is_closed:
            left = node.core.outstanding()
            raise Violation("S6-endless", f"{node.name} does not close: {left}")
        if isinstance(node, DecodeNode):
            _decode_ended(node)
        elif node.grants or node.core._grants.live:
            raise Violation("S6-memory", f"{node.name} is closed and keeps grants")
