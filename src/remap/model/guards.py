# SPDX-License-Identifier: Apache-2.0
"""Guards: torch's operations on an attached model either give the right result or raise before they change anything.

    state_dict, save_pretrained    for a layer that is away: copies of its master copy, on the CPU; for others: as usual
    deepcopy, pickle, torch.save   a model that is not attached, with the same bytes in memory of its own
    load_state_dict                raises while a layer that it would write is away; otherwise it writes as usual
    merge, unmerge (of adapters)   raises while any layer is away; otherwise it writes as usual, and the write is seen
    to, half, cuda, share_memory   raises, unless it changes nothing: a tensor's address never changes
    DistributedDataParallel        finds no parameters to synchronise, and says so

Inside of `advanced.rewrite` every tensor shows its own bytes, and all of these work as usual.

A layer is away while it is streamed, loading, or to be re-pointed: its tensors then show the ring, or nothing yet. The
guards cannot distinguish a direct read of such a tensor (`weight.sum()`) from a pass, so they do not refuse it;
`state_dict()` has the right bytes. The next pass finds a direct write when it ends, and a change that would bring the layer home
refuses (`refuse_lost_writes`): the write is lost, and went into memory that others may have. The layers of a model that never had
pages show a page that holds nothing. A write that no counter sees (`tensor.data.copy_`) is found by its bytes in layers that are
at home, before a state dict or a copy mixes them with layers that are away.

Guards are hooks and attributes of the instances, also of adapters that come later. All of them are marked (`hooks.OURS`), so
`remove` finds every one. They go by the tensor objects, whatever their names are by now.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.nn.modules.module import register_module_module_registration_hook

from remap.errors import InvalidState
from remap.model.bind import differs, own_copy, tensors_of
from remap.model.find import span_of
from remap.model.hooks import OURS

if TYPE_CHECKING:
    from remap.model.bind import Tensors
    from remap.model.master import MasterCopy
    from remap.model.pack import Layout, Placed

__all__ = ["Guards", "Whereabouts"]


_MERGES = ("merge", "unmerge")
"""A module with both writes an adapter into its weights, and takes it out (peft's layers)."""
_GUARDS = ("_apply", "__deepcopy__", "__reduce_ex__", "_ddp_params_and_buffers_to_ignore", *_MERGES)


class Whereabouts(Protocol):
    """The part of a tenant that the guards use."""

    name: str

    def away(self) -> Collection[int]: ...
    def refuse_lost_writes(self) -> None: ...


class _Names(tuple[str, ...]):
    """Names that DistributedDataParallel ignores, marked as ours."""


setattr(_Names, OURS, True)


class Guards:
    """The guards of one model.

    Call `install` after the model's tensors were pointed at the session's memory, and `remove` before they leave it.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        tensors: Tensors,
        master: MasterCopy,
        tenant: Whereabouts,
        written_in: Callable[[Collection[int]], Mapping[int, Any]],
    ) -> None:
        """tensors: those of the layout, and others that are attached (an embedding in host memory). written_in: the layers
        of these that something has written, as far as counters see it.
        """
        self._modules = list(model.modules())
        self._master = master
        self._tenant = tenant
        self._written_in = written_in
        self._tensors = {id(tensor): tensor for tensor in tensors.values()}
        self._placed: dict[int, tuple[int, Placed]] = {  # id of a layer's tensor -> its layer and place
            id(tensors[placed.spec.path]): (part.index, placed)
            for part in layout.parts
            for placed in part.tensors
            if part.index is not None
        }
        self._handles: list[Any] = []
        # Modules that merge adapters, of which some come later, and may go.
        self._merging: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._stop: Callable[[], Any] = lambda: None
        self._load, self._collect = _ours(self._loading()), _ours(self._collecting())
        # (state dict, its copies so far): in one state dict, two names of one tensor are two names of one copy.
        self._copies: tuple[Any, dict[object, torch.Tensor | None]] = (None, {})
        self.writing = False  # until `advanced.rewrite` is over every tensor shows its own bytes, wherever its layer is
        # Values of state dicts, by id: those that show attached memory leave it with the model.
        self.shown: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()

    def install(self) -> None:
        for tensor in self._tensors.values():
            for name, guard in (("__deepcopy__", self._copying(tensor)), ("__reduce_ex__", self._pickling(tensor))):
                tensor.__dict__[name] = _ours(guard)
        for module in self._modules:
            _guard_copies(module)
            module.__dict__["_apply"] = _ours(self._applying(module))
            names = [name for name, tensor in tensors_of(module).items() if id(tensor) in self._tensors]
            module.__dict__["_ddp_params_and_buffers_to_ignore"] = _Names(names)
            self._handles.append(module.register_load_state_dict_pre_hook(self._load))
            self._handles.append(module.register_state_dict_post_hook(self._collect))
            if _merges(module):
                self._guard_merges(module)
        # Those that come later are seen when they take a module of the model's as their child. That is a hook of the process: it
        # must not keep a model alive whose session was dropped unclosed, and some models make a list of modules in every pass.
        found = weakref.ref(self)

        def arrives(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if _merges(parent) and child is not None:
                guards = found()
                if guards is not None and any(id(tensor) in guards._placed for tensor in tensors_of(child).values()):
                    guards._guard_merges(parent)

        self._stop = weakref.finalize(self, register_module_module_registration_hook(arrives).remove)

    def _guard_merges(self, module: nn.Module) -> None:
        self._merging.add(module)
        _guard_copies(module)
        for name in _MERGES:
            module.__dict__[name] = _ours(self._merge(getattr(type(module), name).__get__(module), module, name))

    def remove(self) -> None:
        """Restore the model as it was before `install`. Cannot fail."""
        self._stop()
        while self._handles:
            self._handles.pop().remove()
        for owner in (*self._tensors.values(), *self._modules, *self._merging):
            for name in _GUARDS:
                if getattr(owner.__dict__.get(name), OURS, False):
                    del owner.__dict__[name]

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _gone(self) -> Collection[int]:
        return () if self.writing else self._tenant.away()

    def _away(self) -> Collection[int]:
        """The layers that are away.

        Raises InvalidState if one was written while it was streamed: its bytes are lost.
        """
        away = self._gone()
        if away:
            self._tenant.refuse_lost_writes()
        return away

    def _from_master(self, tensor: torch.Tensor, away: Collection[int]) -> torch.Tensor | None:
        """A copy of the tensor's bytes on the CPU if its layer is away, else None.

        Raises InvalidState if it is at home and was written in a way that no counter saw: layers that are away cannot show
        whether they were written too, so it would be one of two models.
        """
        layer, placed = self._placed.get(id(tensor), (None, None))
        if layer is None or placed is None or not away:
            return None
        if layer in away:
            self._master.refuse_change((layer,))
            return own_copy(self._master.tensor(layer)[placed.offset : placed.offset + span_of(tensor)], tensor)
        seen = self._written_in((layer,)) or self._master.changed((layer,))
        if not seen and differs(placed, tensor, self._master.tensor(layer)):
            raise InvalidState(
                f"{placed.spec.path} of tenant {self._tenant.name!r} was written in a way that no counter sees, and layers "
                f"{sorted(away)} are away: what was written into them is lost; nothing was copied; write by "
                "advanced.rewrite",
                tenant=self._tenant.name,
                path=placed.spec.path,
                layers=tuple(sorted(away)),
            )
        return None

    def _duplicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Another tensor of the same type with the same bytes, on the same device, in memory of its own."""
        with torch.no_grad():
            data = self._from_master(tensor, self._away())
            data = tensor.detach().clone() if data is None else data.to(tensor.device)
        if not isinstance(tensor, nn.Parameter):
            return data.requires_grad_(tensor.requires_grad)
        made: torch.Tensor = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
        made.__dict__.update(_bare(tensor.__dict__))
        return made

    # -- guards of tensors -----------------------------------------------------------------------------------------

    def _copying(self, tensor: torch.Tensor) -> Callable[..., Any]:
        def deepcopy(memo: dict[int, Any]) -> Any:
            return self._duplicate(tensor)

        return deepcopy

    def _pickling(self, tensor: torch.Tensor) -> Callable[..., Any]:
        def reduce_ex(protocol: int) -> Any:
            return self._duplicate(tensor).__reduce_ex__(protocol)

        return reduce_ex

    # -- guards of modules -----------------------------------------------------------------------------------------

    def _applying(self, module: nn.Module) -> Callable[..., Any]:
        def apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            kinds = {
                (tensor.dtype, tensor.device, tensor.dim()): name
                for name, tensor in tensors_of(module).items()
                if id(tensor) in self._tensors and (recurse or "." not in name)
            }
            for (dtype, device, dim), name in kinds.items():
                # Try fn on a small tensor: share_memory() changes its argument, and half() of all weights takes memory.
                probe = torch.empty((2,) * dim, dtype=dtype, device=device)
                before = probe.data_ptr()
                if fn(probe) is not probe or probe.data_ptr() != before:
                    raise InvalidState(
                        f"{name} belongs to tenant {self._tenant.name!r} and cannot be moved or converted while it is "
                        "attached; nothing changed; detach the model first, and attach it again afterwards",
                        tenant=self._tenant.name,
                        path=name,
                    )
            made: nn.Module = type(module)._apply(module, fn, recurse)
            return made

        return apply

    def _merge(self, write: Callable[..., Any], module: nn.Module, name: str) -> Callable[..., Any]:
        def merge(*args: Any, **kwargs: Any) -> Any:
            away = sorted(self._gone())
            if away:
                raise InvalidState(
                    f"{name}() would write into layers of tenant {self._tenant.name!r}, of which {away} are away; nothing was "
                    "written; call it while all layers are resident, or after detach",
                    tenant=self._tenant.name,
                    layers=tuple(away),
                )
            try:
                return write(*args, **kwargs)
            finally:  # adapters write through `data`, which no counter sees
                for tensor in tensors_of(module).values():
                    if id(tensor) in self._placed:
                        increment_version(tensor)  # of inference tensors there is none, and it does nothing

        return merge

    def _loading(self) -> Callable[..., None]:
        def refuse(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
            gone = self._gone()
            inside = tensors_of(module) if gone else {}
            written = {
                self._placed[id(t)][0] for n, t in inside.items() if prefix + n in state and id(t) in self._placed
            }
            away = sorted(written.intersection(gone))
            if away:
                raise InvalidState(
                    f"load_state_dict would write into layers {away} of tenant {self._tenant.name!r}, which are "
                    "streamed or loading; nothing was loaded; detach the model first, or load while all its layers are "
                    "resident",
                    tenant=self._tenant.name,
                    layers=tuple(away),
                )

        return refuse

    def _collecting(self) -> Callable[..., None]:
        def collect(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            away = self._away()
            known = self._copies
            if known[0] is None or known[0]() is not state:
                known = self._copies = (_weakly(state), {})
            for name, tensor in tensors_of(module).items():
                value = state.get(prefix + name)
                if id(tensor) in self._placed and value is not None:
                    layer, placed = self._placed[id(tensor)]
                    key = (layer, placed.offset, tensor.dtype, tensor.shape, tensor.stride())
                    if key not in known[1]:
                        known[1][key] = self._from_master(tensor, away)
                    made = known[1][key]
                    if made is not None:
                        state[prefix + name] = value = made
                if isinstance(value, torch.Tensor):
                    self.shown[id(value)] = value

        return collect


def _weakly(state: Any) -> Any:
    try:
        return weakref.ref(state)
    except TypeError:  # a plain dict of the caller's: each name of a tensor gets its own copy
        return None


def _merges(module: nn.Module) -> bool:
    return all(callable(getattr(type(module), name, None)) for name in _MERGES)


def _ours(function: Callable[..., Any]) -> Callable[..., Any]:
    setattr(function, OURS, True)
    return function


def _bare(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """An instance's attributes without those that this library has set."""
    kept = {}
    for name, value in attributes.items():
        if getattr(value, OURS, False) is True:
            continue
        if name.endswith("_hooks") and isinstance(value, dict):
            value = type(value)((key, hook) for key, hook in value.items() if getattr(hook, OURS, False) is not True)
        kept[name] = value
    return kept


def _guard_copies(module: nn.Module) -> None:
    """Copies of the module are made without what this library has put into it."""

    def reduce_ex(protocol: int) -> Any:
        made = type(module).__reduce_ex__(module, protocol)
        if isinstance(made, tuple) and len(made) > 2 and isinstance(made[2], dict):
            return (*made[:2], _bare(made[2]), *made[3:])
        return made

    def deepcopy(memo: dict[int, Any]) -> Any:
        own = getattr(type(module), "__deepcopy__", None)
        if own is not None:  # torch gives a module such a class when it is parametrized
            bare = module.__new__(type(module))
            bare.__dict__.update(_bare(module.__dict__))
            memo.setdefault(id(memo), []).append(bare)  # its id must not become another's
            memo[id(module)] = made = own(bare, memo)
            return made
        make, arguments, state = reduce_ex(4)[:3]
        memo[id(module)] = made = make(*copy.deepcopy(arguments, memo))
        made.__setstate__(copy.deepcopy(state, memo))
        return made

    module.__dict__.update({"__reduce_ex__": _ours(reduce_ex), "__deepcopy__": _ours(deepcopy)})
