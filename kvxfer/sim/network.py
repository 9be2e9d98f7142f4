"""The control plane: frames that are late, lost, doubled, overtaken, or cut off by a partition.

ZeroMQ keeps the order of a connection; nothing here does, so the cores are tried with less than they are promised.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvxfer.protocol.messages import Message, Reserve
from kvxfer.sim.world import World

if TYPE_CHECKING:
    from kvxfer.sim.decode_node import DecodeNode

RECENT = 64


class Network:
    """Delivers control frames between the world's nodes. Knows every open socket by its route."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sockets: dict[bytes, tuple[DecodeNode, int]] = {}
        self._cut: dict[frozenset[str], bool] = {}  # pairs that a partition parts; True: frames wait for its end
        self._arrives: dict[tuple[str, str], float] = {}
        self._held: list[tuple[frozenset[str], Callable[[], None]]] = []
        self.recent: deque[Callable[[], None]] = deque(maxlen=RECENT)  # frames that were sent, to be replayed
        self.last: dict[tuple[bytes, bool], tuple[bytes, int]] = {}  # (route, to prefill) -> epoch, sequence
        self.reserves: deque[tuple[bytes, Reserve]] = deque(maxlen=RECENT)  # with the epoch of each

    # ---- sockets -----------------------------------------------------------------------------------------------------

    def open(self, route: bytes, node: DecodeNode, session: int) -> None:
        self._sockets[route] = (node, session)

    def close(self, route: bytes) -> None:
        self._sockets.pop(route, None)

    def route_of(self, session: int, node: DecodeNode) -> bytes:
        return f"{node.name}/{node.incarnation}/{session}".encode()

    # ---- frames ------------------------------------------------------------------------------------------------------

    def to_prefill(
        self, node: DecodeNode, session: int, peer: str, epoch: bytes, sequence: int, message: Message
    ) -> None:
        route = self.route_of(session, node)
        self.last[route, True] = epoch, sequence
        if isinstance(message, Reserve):
            self.reserves.append((epoch, message))

        def arrive() -> None:
            target = self._world.nodes.get(peer)
            if target is not None:
                target.frame(route, epoch, sequence, message)  # type: ignore[attr-defined]

        self._transmit(node.name, peer, arrive)

    def to_decode(self, sender: str, route: bytes, epoch: bytes, sequence: int, message: Message) -> None:
        socket = self._sockets.get(route)
        if socket is None:
            self._world.note(sender, "unroutable")
            return
        node, session = socket
        if sequence < 1 << 62:  # not a word to a stranger
            self.last[route, False] = epoch, sequence

        def arrive() -> None:
            if route in self._sockets:
                node.frame(session, epoch, sequence, message)

        self._transmit(sender, node.name, arrive)

    def _transmit(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        world = self._world
        pair = frozenset((source, target))
        if pair in self._cut:
            if self._cut[pair]:
                self._held.append((pair, arrive))
            world.counts["frames cut off"] += 1
            return
        weather = world.plan.weather
        dice = world.chance(f"net:{source}>{target}")
        calm = world.healed
        for _ in range(2 if not calm and dice.random() < weather.duplicate else 1):
            if not calm and dice.random() < weather.loss:
                world.counts["frames lost"] += 1
                continue
            delay_s = weather.delay_s + dice.random() * (0.01 if calm else weather.jitter_s)
            if weather.slow and not calm and dice.random() < weather.slow:
                delay_s += dice.random() * weather.slow_s
            when = world.now + delay_s
            if weather.ordered:
                when = self._arrives[source, target] = max(when, self._arrives.get((source, target), 0.0))
            world.at(when, arrive)
        self.recent.append(arrive)

    # ---- partitions --------------------------------------------------------------------------------------------------

    def cut(self, one: str, other: str, keeps: bool) -> None:
        """``keeps``: what is sent meanwhile arrives afterwards, as TCP would do."""
        self._cut[frozenset((one, other))] = keeps

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self._cut

    def mend(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        if self._cut.pop(pair, None) is None:
            return
        held, self._held = self._held, []
        for key, arrive in held:
            if key == pair:
                self._world.later(self._world.plan.weather.delay_s, arrive)
            else:
                self._held.append((key, arrive))

    def mend_all(self) -> None:
        for pair in list(self._cut):
            one, other = sorted(pair)
            self.mend(one, other)
