# SPDX-License-Identifier: Apache-2.0
"""Which groups merge when KV runs out: the drop plan, and a drop as an offer among others. Pure.

A plan divides the present groups into those that merge; nothing is copied, and no group is taken apart (`restore` does that).
Merging g groups leaves one copy of the model where there were g. A merged group is divided by `stages`, for most tokens. A
merger that frees tokens has room for the requests that run in it, since its parts had; no plan below has one that frees none.
Plans are compared by, in this order:

    missing     tokens of the need that the plan does not free
    added_s     seconds by which requests wait longer for their next token, over all requests of merged groups, when the burst
                has filled the room that there is: a group then has requests in proportion to its capacity, however they
                are spread now. A merged group that is quicker than its parts counts as 0: that is no reason to drop
    longest     instances of the largest group
    squares     the sum of squared sizes, which is the mean number of stages times the instances; so nothing merges in vain
    stalled     tokens of the requests that run in merged groups: part of their KV has to move

Without load this is the paper's rule, as few stages as possible, and says which of {4, 2} and {3, 3} is better.

A drop is one donor among others. An instance alone has offers as well (`Offer`: layers that stream, pages that are lent), which
are room that it has already: a need is the part beyond them, and a merger frees that much less. That is right where they are
the cheaper donors. Where one is dearer than the drop of an instance and another like it, `preferred` leaves it out; but no group
merges into less room than the instances have alone with all of their offers (`decided`). All are measured in the same way: by
how many seconds requests wait longer for their next tokens when the room is filled, for each token of room.

Requests that have no room even so take turns, swapped to host memory if there is any for that, else computed again. That comes
last, and is not compared. By the same measure (does the merged group, full, compute as many tokens a second as its parts?) some
mergers seemed dearer that were not: it sees neither the tokens computed again nor that a waiting request has no token at
all. In the simulator P99 TTFT of a ShareGPT burst rose from 6 to 15 s by it.

`plan` is exact for up to EXACT instances: it looks at every partition. With more it takes the better of the paper's greedy and
of equal sizes, floor and ceil of N / G for the largest number of groups G that suffices, the groups with fewest tokens in the
larger ones; and undoes superfluous mergers. It is never worse than the greedy. A need that cannot be met is no error.

Source: KunServe, section 4.1, algorithm in its Figure 6 (`greedy`). Decided here: the tokens that a merge frees are counted
exactly (it is a copy of the weights only if layers divide evenly and instances are equal); a group whose merger with the next
smallest frees nothing stays as it is; equal sizes merge in the order given. The order of plans is derived.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

from .dispatch import load_share, needed, overloaded
from .pipeline import Network, group_round_s
from .placement import Group, InstanceLoad, Offer, Placement, PlannedStage, ServedLayers
from .stages import ORDERS, Splits

__all__ = ["EXACT", "DropPlan", "decided", "greedy", "plan", "preferred", "wider"]

EXACT = 8
"""Instances up to which every partition is looked at: 4,140 for 8."""

_Parts = tuple[tuple[int, ...], ...]
"""Which groups become one, by their numbers; each in one part."""


@dataclass(frozen=True, order=True)
class DropPlan:
    """A placement to change to, and what that is worth; plans compare as the module says, the better one is less.

    placement: with the next epoch, or the present one if nothing merges. epoch: that the plan was made for. freed: tokens
    by which capacity grows; missing: the need beyond that.
    """

    missing: int
    added_s: float
    longest: int
    squares: int
    stalled: int
    freed: int = field(compare=False)
    epoch: int = field(compare=False)
    placement: Placement = field(compare=False)


_Find = Callable[[Placement, int, Network], DropPlan]


def plan(placement: Placement, need: int, network: Network) -> DropPlan:
    """The best plan (see the module) that frees `need` tokens of KV, or as many of them as can be freed. The placement must
    pass `check`, or be what `preferred` made of one that does; it does not change."""
    mergers = _Mergers(placement, network)
    return mergers.plan(mergers.best(need), need)


def preferred(placement: Placement, network: Network) -> Placement:
    """The placement without those offers than which a drop costs less (see the module); the same one if no group asks for more
    than fits without any. It does not change."""
    if not overloaded(replace(placement, groups=tuple(map(_resident, placement.groups)))):
        return placement
    density = _density(placement)

    def filled(stage: PlannedStage) -> tuple[int, int, float]:
        """Its tokens, the requests that have them, and seconds of their round."""
        tokens = stage.capacity(placement.model)
        requests = math.ceil(density * tokens)
        return tokens, requests, group_round_s(placement.model, [stage], requests, network)

    @cache
    def kept(stage: PlannedStage) -> tuple[Offer, ...]:
        plain = replace(stage, offers=())
        pair = _Mergers(Placement(placement.model, (Group((plain,)),) * 2), network, density)
        freed, added_s = pair.gain((0, 1)), pair.added_s((0, 1))
        here = filled(plain)
        for count in range(1, len(stage.offers) + 1):
            more = filled(replace(stage, offers=stage.offers[:count]))
            if freed > 0 and more[1] * (more[2] - here[2]) * freed > added_s * (more[0] - here[0]):
                return stage.offers[: count - 1]
            here = more
        return stage.offers

    def judged(group: Group) -> Group:
        (stage, *others) = group.stages
        return group if others or not stage.offers else Group((replace(stage, offers=kept(_like(stage))),))

    return replace(placement, groups=tuple(map(judged, placement.groups)))


def decided(
    placement: Placement,
    network: Network,
    find: _Find = plan,
    ahead: tuple[int, int] = (0, 0),
) -> DropPlan | None:
    """The groups that merge now, as `find` plans them; None if no group has to. ahead: `Foresight.ahead`.

    Offers that are dearer than a drop do not count (`preferred`), unless it leaves a merged group with less room than its
    instances have alone, all of their offers taken: then offers count all, and only a need beyond them is a reason to merge.
    A token of room that a drop has not got makes a request wait for its first token until another request has ended; a dear
    offer makes all wait a fraction of a pass longer.
    """
    if _always_loses_room(placement):
        return None  # as would come of what follows, which takes milliseconds at each look in a burst
    soon, later = ahead

    def has_to(here: Placement) -> bool:
        return bool(overloaded(here)) or (soon > 0 and _lacks(here, soon))

    judged = preferred(placement, network)
    if not has_to(judged):
        return None
    found = _broad(judged, network, find, later)
    if judged == placement or not _loses_room(found.placement, placement):
        return found
    return _broad(placement, network, find, later) if has_to(placement) else None


def _broad(placement: Placement, network: Network, find: _Find, later: int) -> DropPlan:
    """For what is lacking now, and as much of what will be as takes no larger groups, or pairs. A forecast says how many merge,
    not how deep: longer pipelines cost most, and none that is lacking yet."""
    need = needed(placement)
    now, more = find(placement, need, network), needed(placement, later) - need
    while more > 0:
        found = find(placement, need + more, network)
        if found.longest <= max(2, now.longest):
            return found
        more //= 2
    return now


def _lacks(placement: Placement, ahead: int) -> bool:
    """Whether demand is above what there is, when it has risen by this."""
    demand = sum(group.load.demand for group in placement.groups) + ahead
    return demand > sum(max(0, group.capacity(placement.model)) for group in placement.groups)


def _loses_room(after: Placement, before: Placement) -> bool:
    """Whether a merged group has less room than its instances had before, with their offers."""
    model = before.model
    room = {stage.instance.name: group for group in before.groups for stage in group.stages}
    for group in after.groups:
        parts = {id(room[stage.instance.name]): room[stage.instance.name] for stage in group.stages}
        if len(parts) > 1 and group.capacity(model) < sum(max(0, part.capacity(model)) for part in parts.values()):
            return True
    return False


def _always_loses_room(placement: Placement) -> bool:
    """Whether any merged group would have less room than its instances have, with all of their offers: that is known if what all
    of them hold beside their KV is less than one copy of the weights, which a merged group still has."""
    model, count = placement.model, len(placement.model.layers)
    each = model.kv_bytes(0, count)
    beside = (
        sum(stage.instance.memory_bytes for stage in group.stages) - each * max(0, group.capacity(model))
        for group in placement.groups
    )
    return sum(max(0, nbytes) for nbytes in beside) < model.weight_bytes(0, count)


def greedy(placement: Placement, need: int, network: Network) -> DropPlan:
    """KunServe's plan: merge the two smallest groups until enough is freed, or no two are left. Arguments as for `plan`."""
    mergers = _Mergers(placement, network)
    return mergers.plan(mergers.greedy(need), need)


def wider(placement: Placement, number: int, tokens: int) -> Group | None:
    """This group merged with as few others as it takes, those with the least load first, until a request of `tokens` tokens has
    room, and more than the group has now; None if all of them do not suffice. The placement does not change."""
    model, group = placement.model, placement.groups[number]
    needs = max(tokens, group.capacity(model) + 1)
    others = [each for place, each in enumerate(placement.groups) if place != number]
    splits, stages = Splits(model), list(group.stages)
    for other in sorted(others, key=lambda each: load_share(model, each)):
        stages += other.stages
        if splits.tokens(stages) >= needs:
            return Group(splits.split(stages, 1.0))
    return None


def _density(placement: Placement) -> float:
    """Requests for each token that they ask for."""
    loads = [group.load for group in placement.groups]
    return sum(load.requests for load in loads) / max(1, sum(load.wanted for load in loads))


def _resident(group: Group) -> Group:
    """The group without its offers."""
    return Group(tuple(replace(stage, offers=()) for stage in group.stages))


def _like(stage: PlannedStage) -> PlannedStage:
    """The stage without name and load: the same for equal instances alone."""
    return replace(stage, instance=replace(stage.instance, name="", load=InstanceLoad()))


class _Mergers:
    """Capacities and added seconds of merged groups of one placement; each is computed once. density: of requests, if they are
    not those of the placement."""

    def __init__(self, placement: Placement, network: Network, density: float | None = None) -> None:
        self.placement = placement
        self.network = network
        self.instances = sum(len(group.stages) for group in placement.groups)
        self.splits = Splits(placement.model, ORDERS if self.instances <= EXACT else 16)
        self.density = _density(placement) if density is None else density
        self.capacity = cache(self._capacity)
        self.group = cache(self._group)
        self.round_s = cache(self._round_s)
        self.added_s = cache(self._added_s)
        self.gain = cache(self._gain)
        self.weight = cache(self._weight)

    def _capacity(self, part: tuple[int, ...]) -> int:
        """Tokens of the group that these become; of one alone its present ones, at least the tokens that run there: it may have
        taken offers that do not count (`preferred`)."""
        if len(part) == 1:
            group = self.placement.groups[part[0]]
            return max(0, group.capacity(self.placement.model), group.load.tokens)
        return self.splits.tokens([stage for number in part for stage in self.placement.groups[number].stages])

    def _gain(self, part: tuple[int, ...]) -> int:
        """Tokens that the merger frees; below 0 if it loses some."""
        return self.capacity(part) - sum(self.capacity((number,)) for number in part)

    def requests(self, part: tuple[int, ...]) -> int:
        """As many as fill the group that these become."""
        return math.ceil(self.density * self.capacity(part))

    def _group(self, part: tuple[int, ...]) -> Group:
        if len(part) == 1:
            return self.placement.groups[part[0]]
        stages = [stage for number in part for stage in self.placement.groups[number].stages]
        return Group(self.splits.split(stages, max(1, -(-self.requests(part) // len(stages)))))

    def _round_s(self, part: tuple[int, ...]) -> float:
        return group_round_s(self.placement.model, self.group(part).stages, self.requests(part), self.network)

    def _added_s(self, part: tuple[int, ...]) -> float:
        if len(part) == 1:
            return 0.0
        counts = [self.requests((number,)) for number in part]
        rounds = [self.round_s((number,)) for number in part]
        before = math.fsum(count * each for count, each in zip(counts, rounds)) / max(1, sum(counts))
        return self.requests(part) * max(0.0, self.round_s(part) - before)

    def _weight(self, part: tuple[int, ...]) -> tuple[int, float, int, int, int]:
        """Its addition to each number that plans are compared by, but the tokens that it frees for those that are missing."""
        groups = [self.placement.groups[number] for number in part]
        size = sum(len(group.stages) for group in groups)
        stalled = sum(group.load.tokens for group in groups) if len(part) > 1 else 0
        return self.gain(part), self.added_s(part), size, size * size, stalled

    def order(self, parts: _Parts, need: int) -> tuple[int, float, int, int, int]:
        """The numbers that plans are compared by."""
        freed, added_s, sizes, squares, stalled = zip(*map(self.weight, parts))
        return max(0, need - sum(freed)), math.fsum(added_s), max(sizes), sum(squares), sum(stalled)

    def plan(self, parts: _Parts, need: int) -> DropPlan:
        after, epoch = self.placement, self.placement.epoch
        if len(parts) < len(after.groups):
            after = Placement(after.model, tuple(map(self.group, parts)), epoch + 1)
        return DropPlan(*self.order(parts, need), sum(map(self.gain, parts)), epoch, after)

    def best(self, need: int) -> _Parts:
        """The parts that `plan` carries out."""
        none = tuple((number,) for number in range(len(self.placement.groups)))
        if need <= 0:
            return none
        if self.instances > EXACT:
            found = [self.trimmed(parts, need) for parts in (self.greedy(need), self.even(need))]
            return min(found, key=partial(self.order, need=need))
        return min(_partitions(len(none)), key=partial(self.order, need=need))

    def greedy(self, need: int) -> _Parts:
        queue: list[tuple[int, tuple[int, ...]]] = [
            (len(group.stages), (number,)) for number, group in enumerate(self.placement.groups)
        ]
        heapq.heapify(queue)
        left: list[tuple[int, ...]] = []
        freed = 0
        while freed < need and len(queue) > 1:
            (size, part), (other_size, other) = heapq.heappop(queue), heapq.heappop(queue)
            merged = tuple(sorted((*part, *other)))
            more = self.capacity(merged) - self.capacity(part) - self.capacity(other)
            if more <= 0:
                left.append(part)
                heapq.heappush(queue, (other_size, other))
                continue
            freed += more
            heapq.heappush(queue, (size + other_size, merged))
        return tuple(sorted([*left, *(part for _, part in queue)]))

    def even(self, need: int) -> _Parts:
        """Groups of equal sizes, as many as suffice; if none do, of the size that frees most.

        Each merger frees about a copy, which says how many groups there may be. Sizes that do not divide the layers free
        less, so fewer groups are tried, in growing strides, and every size once: a group has no use for more instances than
        layers.
        """
        model, groups = self.placement.model, len(self.placement.groups)
        high = max(1, groups + need // -max(1, _copy_tokens(model)))
        sizes = range(1 + self.instances // high, 1 + min(self.instances, len(model.layers)))
        strides = [high - (1 << power) for power in range((high - 1).bit_length())]
        counts = {high, *(-(-self.instances // size) for size in sizes), *strides}
        most: tuple[int, _Parts] | None = None
        for count in sorted(counts, reverse=True):
            parts = self._dealt(count)
            freed = sum(map(self.gain, parts))
            if freed >= need:
                return parts
            if most is None or freed > most[0]:
                most = freed, parts
        assert most is not None  # `high` is a count
        return most[1]

    def _dealt(self, count: int) -> _Parts:
        """`count` parts, of as equal sizes as whole groups allow; those whose merger frees nothing stay apart."""
        groups = self.placement.groups
        room = [-(-(self.instances - place) // count) for place in range(count)]
        parts: list[list[int]] = [[] for _ in room]
        first = 0  # parts before it are full
        for number in sorted(range(len(groups)), key=lambda i: (-len(groups[i].stages), groups[i].load.tokens, i)):
            size = len(groups[number].stages)
            while first < count - 1 and room[first] <= 0:
                first += 1
            place = next((place for place in range(first, count) if room[place] >= size), None)
            if place is None:
                place = max(range(count), key=lambda place: room[place])
            parts[place].append(number)
            room[place] -= size
        found: list[tuple[int, ...]] = []
        for each in map(tuple, map(sorted, filter(None, parts))):
            found += [each] if len(each) == 1 or self.gain(each) > 0 else [(i,) for i in each]
        return tuple(sorted(found))

    def trimmed(self, parts: _Parts, need: int) -> _Parts:
        """Without mergers that are not needed, the dearest first."""
        freed, found = sum(map(self.gain, parts)), list[tuple[int, ...]]()
        for part in sorted(parts, key=lambda part: (-self.added_s(part), -len(part), part)):
            if len(part) > 1 and freed - self.gain(part) >= min(need, freed):
                freed -= self.gain(part)
                found += [(number,) for number in part]
            else:
                found.append(part)
        return tuple(sorted(found))


def _copy_tokens(model: ServedLayers) -> int:
    """Tokens of KV in as many bytes as the model has."""
    return model.weight_bytes(0, len(model.layers)) // max(1, model.kv_bytes(0, len(model.layers)))


def _partitions(count: int) -> Iterator[_Parts]:
    """Every way to divide the numbers below `count` into parts."""
    if not count:
        yield ()
        return
    for parts in _partitions(count - 1):
        yield (*parts, (count - 1,))
        for place, part in enumerate(parts):
            yield (*parts[:place], (*part, count - 1), *parts[place + 1 :])
