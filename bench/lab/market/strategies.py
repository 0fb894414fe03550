"""The models on the device and their turns. All have the same memory, link, roofline and requests; KV of a model whose turn is
over goes to host memory and comes back over the link with its next turn.

    ours         layers come and go: an activation takes the layers that idle models need not keep for `ttft_s` (the certificate
                 of first layers), then those of the models used longest ago; a pass begins with the first layer; a model that
                 begins to wait has first layers loaded beside others' turns; turns by what is due (`remap.policy.turns`)
    whole, due   the same turns, of whole models: the least recently used leave, a pass begins when all of it is there
    LRU          whole models as before, groups: the model that has waited longest is next, and its turn drains
    round robin  whole models as before, turns of a second, one after the other
    Aegaeon      after its section 5, on one GPU instead of a pool: whole models, the next one is loaded beside the present turn
                 if both fit; prefills in groups of at most 8 of one model, first come, first served; then a round of decoding, in
                 which each model has a turn in proportion to what its targets leave
    sleep mode   one model is awake: all of it leaves, and the next one's comes, when the turn has drained
    kvcached     all weights stay on the device, KV is shared; passes of models that have work alternate
    static       all weights stay on the device, and KV of 16 requests of each
    ample        memory for everything, and the better of two rules for turns, ours and every 50 ms another model: what the device
                 can compute, one model at a time
"""

from __future__ import annotations

import math

from remap.policy.hidden import first_kept, lateness_beyond
from remap.policy.turns import Next, PresentTurn, Turns

from .world import Device, Tenant, queue_of

__all__ = ["STRATEGIES", "Aegaeon", "Due", "Grouped", "Ours", "Rounds", "Stay"]

KV_SHARE = 0.1
"""Of the memory, for KV of the model that computes."""
STATIC_REQUESTS, MEAN_TOKENS = 16, 500
LEAST_TURN_S = 0.2
"""Of decoding, Aegaeon's."""


class _Link:
    """Copies one thing after another."""

    def __init__(self) -> None:
        self.free_s = self.link_s = 0.0

    def copy(self, now_s: float, seconds: float) -> float:
        """When it has come."""
        self.free_s = max(self.free_s, now_s) + seconds
        self.link_s += seconds
        return self.free_s


class _Swapping:
    """Weights that come and go. have: bytes at home of each model. used: when each was last used."""

    name = ""
    alone = False  # one model at a time

    def __init__(self, device: Device, tenants: list[Tenant]) -> None:
        self.device, self.tenants = device, tenants
        self._link = _Link()
        self.have = [0] * len(tenants)
        self.used = [-math.inf] * len(tenants)
        self.active: int | None = None
        self.room = int(device.nbytes * (1 - KV_SHARE))

    @property
    def link_s(self) -> float:
        """Seconds of copies."""
        return self._link.link_s

    def fits(self, device: Device, tenants: list[Tenant]) -> bool:
        """The largest model has room."""
        return self.room >= max(each.weights for each in tenants)

    def arrived(self, tenant: Tenant, now_s: float) -> None:
        """Nothing is loaded ahead."""

    def begin(self, tenant: Tenant, now_s: float, pass_layer_s: float) -> float:
        """All of it is loaded before its first pass begins."""
        me = tenant.number
        self.active, self.used[me] = me, now_s
        lacks = tenant.weights - self.have[me]
        if lacks:
            self._make_room(lacks, me, now_s)
        self.have[me] = tenant.weights
        rate = self.device.machine.h2d_bytes_per_s
        seconds = (lacks + tenant.kv_bytes) / rate
        return self._link.copy(now_s, seconds) - now_s if seconds else max(0.0, self.come_s(me) - now_s)

    def come_s(self, me: int) -> float:
        """When what is loaded ahead of it has come."""
        return 0.0

    def _make_room(self, nbytes: int, me: int, now_s: float) -> None:
        others = sorted((n for n in range(len(self.have)) if n != me and self.have[n]), key=self.used.__getitem__)
        for other in others:
            if not self.alone and sum(self.have) + nbytes <= self.room:
                return
            self.have[other] = 0

    def decide(self, now_s: float, turn: PresentTurn | None, busy: list[Tenant]) -> Next:
        """Turns drain; the model that has waited longest is next."""
        if turn is not None and any(each.number == int(turn.name) for each in busy):
            return Next(turn.name)
        return Next(str(min(busy, key=lambda each: each.since_s).number))

    def switch_s(self, tenant: Tenant) -> float:
        """Until its first pass can begin, as of now."""
        return (tenant.weights - self.have[tenant.number] + tenant.kv_bytes) / self.device.machine.h2d_bytes_per_s


class Grouped(_Swapping):
    """Turns drain; the model that has waited longest is next."""

    def __init__(self, device: Device, tenants: list[Tenant], name: str = "LRU", alone: bool = False) -> None:
        super().__init__(device, tenants)
        self.name, self.alone = name, alone


class Rounds(_Swapping):
    """Turns of quantum_s, one after the other."""

    def __init__(
        self, device: Device, tenants: list[Tenant], name: str = "round robin", quantum_s: float = 1.0
    ) -> None:
        super().__init__(device, tenants)
        self.name, self.quantum_s = name, quantum_s

    def decide(self, now_s: float, turn: PresentTurn | None, busy: list[Tenant]) -> Next:
        """See `Strategy`."""
        last = -1 if turn is None else int(turn.name)
        after = [each.number for each in busy if each.number > last] or [each.number for each in busy]
        if turn is not None and any(each.number == last for each in busy):
            end = turn.begun_s + turn.switch_s + self.quantum_s
            if now_s < end or len(busy) == 1:
                return Next(turn.name, None, end if len(busy) > 1 else math.inf)
        return Next(str(after[0]))


class Stay(Rounds):
    """All weights stay; passes alternate every `quantum_s`."""

    def __init__(self, device: Device, tenants: list[Tenant], name: str, kv: int, ample: bool = False) -> None:
        super().__init__(device, tenants, name, 0.05)
        self.kv, self.ample = kv, ample
        self.have = [each.weights for each in tenants]

    def fits(self, device: Device, tenants: list[Tenant]) -> bool:
        """All weights have room, and KV of each (`kv` requests), or a share of the memory for all."""
        whole = sum(each.weights for each in tenants)
        each_kv = sum(self.kv * MEAN_TOKENS * each.model.kv_bytes_per_token for each in tenants)
        return self.ample or whole + (each_kv or KV_SHARE * device.nbytes) <= device.nbytes

    def begin(self, tenant: Tenant, now_s: float, pass_layer_s: float) -> float:
        """Nothing has to come."""
        return 0.0


class Due(_Swapping):
    """Turns by what is due, of whole models."""

    name = "whole, due"

    def __init__(self, device: Device, tenants: list[Tenant]) -> None:
        super().__init__(device, tenants)
        self._turns = Turns(1.0)

    def decide(self, now_s: float, turn: PresentTurn | None, busy: list[Tenant]) -> Next:
        """See `Strategy`."""
        mine = -1 if turn is None else int(turn.name)
        queues = {
            str(each.number): queue_of(each, self.device, 0.0 if each.number == mine else self.switch_s(each))
            for each in busy
        }
        return self._turns.decide(now_s, turn, queues)


class Ours(Due):
    """Layer by layer."""

    name = "ours"

    def __init__(self, device: Device, tenants: list[Tenant], name: str = "ours", ample: bool = False) -> None:
        super().__init__(device, tenants)
        self.name, self.ample = name, ample
        if ample:
            self.room = 1 << 60
            self.have = [each.weights for each in tenants]
        self._come = [0.0] * len(tenants)  # when the last layer that was loaded ahead comes
        self.keep = [self._certified(each) * each.layer_bytes for each in tenants]

    def fits(self, device: Device, tenants: list[Tenant]) -> bool:
        """The largest model has room."""
        return self.ample or super().fits(device, tenants)

    def _certified(self, tenant: Tenant) -> int:
        layers, compute = tenant.model.layers, tenant.prefill_s(32)  # a short prompt
        late_s = max(0.0, self.device.ttft_s - layers * compute)
        return first_kept([compute] * layers, [tenant.layer_s] * layers, late_s)

    def _spare(self, nbytes: int, me: int) -> int:
        """Bytes free for it after idle models gave what they need not keep: at most nbytes."""
        free = self.room - sum(self.have)
        for other in sorted(range(len(self.have)), key=self.used.__getitem__):
            if free >= nbytes:
                break
            tenant = self.tenants[other]
            if other not in (me, self.active) and not tenant.waiting and not tenant.running:
                given = min(max(0, self.have[other] - self.keep[other]), nbytes - free)
                self.have[other], free = self.have[other] - given, free + given
        return min(nbytes, max(0, free))

    def arrived(self, tenant: Tenant, now_s: float) -> None:
        """First layers begin to load, where no model misses the pages."""
        me, size = tenant.number, tenant.layer_bytes
        lacks = tenant.weights - self.have[me]
        if not lacks or me == self.active:
            return
        nbytes = self._spare(lacks, me) // size * size
        if nbytes:
            self.have[me] += nbytes
            self._come[me] = self._link.copy(now_s, nbytes / self.device.machine.h2d_bytes_per_s)

    def begin(self, tenant: Tenant, now_s: float, pass_layer_s: float) -> float:
        """The rest loads; the first pass waits for each layer by itself."""
        me, layers = tenant.number, tenant.model.layers
        rate = self.device.machine.h2d_bytes_per_s
        self.active, self.used[me] = me, now_s
        lacks = tenant.weights - self.have[me]
        if lacks and self._spare(lacks, me) < lacks:
            self._make_room(lacks, me, now_s)
        ahead_s = max(0.0, self._come[me] - now_s)  # of its own layers, still to come
        coming = min(layers, math.ceil(ahead_s / tenant.layer_s)) if ahead_s else 0
        missing = -(-lacks // tenant.layer_bytes) + coming
        kv_s = tenant.kv_bytes / rate
        setup_s = max(0.0, self._link.free_s - now_s - coming * tenant.layer_s) + kv_s
        if lacks or kv_s:
            self._link.copy(now_s, lacks / rate + kv_s)
        self.have[me] = tenant.weights
        if not missing:
            return setup_s if kv_s else 0.0
        return lateness_beyond([pass_layer_s] * layers, [tenant.layer_s] * layers, setup_s)[
            layers - min(missing, layers)
        ]

    def _make_room(self, nbytes: int, me: int, now_s: float) -> None:
        lack = sum(self.have) + nbytes - self.room
        for other in sorted(range(len(self.have)), key=self.used.__getitem__):
            if lack <= 0:
                return
            if other != me:
                size = self.tenants[other].layer_bytes
                given = min(self.have[other], -(-lack // size) * size)
                self.have[other], lack = self.have[other] - given, lack - given


class Aegaeon(_Swapping):
    """See the module. Prefill groups before decoding rounds."""

    name = "Aegaeon"
    group, most_turn_s = 8, 4.0

    def __init__(self, device: Device, tenants: list[Tenant]) -> None:
        super().__init__(device, tenants)
        self._round: list[tuple[int, float]] = []  # whose decoding turns are left, and how long each is
        self._end_s = 0.0
        self._prefills = 0
        self._come = [0.0] * len(tenants)

    def come_s(self, me: int) -> float:
        """When what is loaded ahead of it has come."""
        return self._come[me]

    def decide(self, now_s: float, turn: PresentTurn | None, busy: list[Tenant]) -> Next:
        """See `Strategy`."""
        by_number = {each.number: each for each in busy}
        mine = by_number.get(int(turn.name)) if turn is not None else None
        waiting = [each for each in busy if each.waiting]
        if waiting:
            if mine is not None and mine.waiting and self._prefills < self.group:
                self._prefills += 1
                return Next(str(mine.number))
            first = min(waiting, key=lambda each: each.waiting[0].at_s)
            self._prefills = 1
            self._round = []
            return Next(str(first.number))
        self._prefills = 0
        if turn is not None and mine is not None and now_s < self._end_s:
            return Next(turn.name, None, self._end_s)
        self._round = [one for one in self._round if one[0] in by_number]
        if not self._round:
            self._round = self._shares(busy)
        number, seconds = self._round.pop(0)
        begun = now_s + (0.0 if turn is not None and number == int(turn.name) else self.switch_s(by_number[number]))
        self._end_s = begun + seconds
        if self._round:
            self._ahead(self.tenants[self._round[0][0]], number, now_s)
        return Next(str(number), None, self._end_s)

    def _shares(self, busy: list[Tenant]) -> list[tuple[int, float]]:
        steps = {
            each.number: each.times.pass_s(0, 0, max(1, len(each.running)), 512 * max(1, len(each.running)))
            for each in busy
        }
        rest = {number: self.device.tbt_s / step for number, step in steps.items()}  # n_k: passes within a token's time
        cost = sum(self.switch_s(each) for each in busy if each.number != self.active)
        if not cost:
            return [(each.number, LEAST_TURN_S) for each in busy]
        total = sum(1 / each for each in rest.values())
        alpha = max(cost / (min(rest.values()) * self.most_turn_s) + total, 0.5)
        if alpha - total <= 1e-9:
            return [(number, self.most_turn_s) for number in rest]
        shares = {number: cost / (each * (alpha - total)) for number, each in rest.items()}
        return [(number, min(self.most_turn_s, max(LEAST_TURN_S, share))) for number, share in shares.items()]

    def _ahead(self, tenant: Tenant, present: int, now_s: float) -> None:
        me = tenant.number
        lacks = tenant.weights - self.have[me]
        if not lacks or self.tenants[present].weights + tenant.weights > self.room:
            return
        for other in sorted((n for n in range(len(self.have)) if n not in (me, present)), key=self.used.__getitem__):
            if sum(self.have) + lacks <= self.room:
                break
            self.have[other] = 0
        if sum(self.have) + lacks <= self.room:
            self.have[me] = tenant.weights
            self._come[me] = self._link.copy(now_s, lacks / self.device.machine.h2d_bytes_per_s)


STRATEGIES = {
    "static": lambda device, tenants: Stay(device, tenants, "static", STATIC_REQUESTS),
    "kvcached": lambda device, tenants: Stay(device, tenants, "kvcached", 0),
    "sleep mode": lambda device, tenants: Grouped(device, tenants, "sleep mode", alone=True),
    "LRU": Grouped,
    "round robin": Rounds,
    "Aegaeon": Aegaeon,
    "whole, due": Due,
    "ours": Ours,
    "ample, due": lambda device, tenants: Ours(device, tenants, "ample, due", ample=True),
    "ample, 50 ms": lambda device, tenants: Stay(device, tenants, "ample, 50 ms", 0, ample=True),
}
"""name -> (device, tenants) -> the strategy; "ample" is the better of the last two."""
