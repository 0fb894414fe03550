# SPDX-License-Identifier: Apache-2.0
"""The source of an attach: a torch model, or plain buffers.

The model's tensors are re-pointed last (`install`): all or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from remap import _core
from remap.errors import InvalidArgument, OutOfMemory
from remap.kv.spec import KVSpec
from remap.model.kv_fit import require_fit
from remap.model.protocols import Handle, LockedMemory, TargetDevice
from remap.sizes import show_size, shown

if TYPE_CHECKING:
    from torch import nn

__all__ = ["LayerSource", "model_source", "raw_source"]

# Addresses [first, stop) of attached models' tensors, in all sessions of this process: a model can be in only one
# session.
_INSTALLED: list[tuple[int, int]] = []


@dataclass(frozen=True)
class LayerSource:
    """The source of an attach: bytes per layer, master copies, and functions that use the layers' addresses."""

    layer_bytes: tuple[int, ...]
    kv_layers: int  # the first layers, which have a KV cache; later ones (an lm_head) have none
    master_addresses: tuple[int, ...]
    rest_bytes: int
    fill_rest: Callable[[int], None]  # (rest address): copy the tensors that belong to no layer, once
    # (addresses, rest address, tenant): re-point the model's tensors, put hooks and guards in; all or none
    install: Callable[[Sequence[int], int, Handle], None]
    # (layers, device): move the model back to ordinary memory there; these layers' bytes come from their masters
    detach: Callable[[Sequence[int], Any], None]
    # (layers): for each layer that may not stream, the places written since attach: its tensors, or its weights file
    watch: Callable[[Collection[int]], dict[int, list[str]]]
    # (layers, replaced): tensors of each written since attach; replaced: those too in whose place the model has others now
    writes: Callable[[Collection[int], bool], dict[int, list[str]]]
    # (layers): raises InvalidState if the weights file that one of them comes from has changed; None: there are no
    # files
    verify: Callable[[Collection[int]], None] | None
    keep_alive: Any
    modules: tuple[Any, ...] = ()
    # (layers): tensors of each whose bytes are not those of its master copy; reads all bytes
    differing: Callable[[Collection[int]], dict[int, list[str]]] = lambda layers: {}
    # The last part, which is no layer: tensors outside of the layers that go with them when their tenant gives all up. None:
    # such tensors are all in the rest, and stay.
    embedding_part: int | None = None
    # (layers): until `renew` the tensors of these layers show their master copies
    at_masters: Callable[[Collection[int]], None] = lambda layers: None
    # (the same layers): undo that, make the master copies of all others anew from their bytes, and forget the writes. Returns the
    # tensors that no longer fit their place: these are as they were. Can be called again. None: another object owns these bytes
    renew: Callable[[Collection[int]], list[str]] | None = None

    def released(self) -> LayerSource:
        """The source without its hold on the master copies: no copy reads them any more."""
        return replace(self, keep_alive=None)


def raw_source(views: Sequence[memoryview], host: LockedMemory | None) -> LayerSource:
    """Layers as plain bytes (for an engine without torch). The viewed buffers are the master copies and stay alive.

    host: memory that the device reads, if it needs such: it page-locks the buffers, or copies of those that cannot be locked in
    place; or it stages the buffers, if there is no room.
    """
    # from_buffer_copy would copy and from_buffer refuses read-only memory; the address is all that is needed.
    addresses = [_core.buffer_address(view) for view in views]
    if host is not None:
        addresses = host.hold_all([(at, view.nbytes, not view.readonly) for at, view in zip(addresses, views)])
    return LayerSource(
        layer_bytes=tuple(view.nbytes for view in views),
        kv_layers=len(views),
        master_addresses=tuple(addresses),
        rest_bytes=0,
        fill_rest=lambda rest: None,
        install=lambda targets, rest, tenant: None,
        detach=lambda away, device: None,
        watch=lambda layers: {},
        writes=lambda layers, replaced: {},
        verify=None,
        keep_alive=views,
    )


def _check(embedding: object, mutable: object) -> None:
    if embedding not in ("device", "host"):
        raise InvalidArgument(
            f"embedding must be 'device' or 'host', got {shown(embedding)}; nothing was attached", embedding=embedding
        )
    if isinstance(mutable, str):
        raise InvalidArgument(
            f"mutable= takes a sequence of patterns, not the one string {shown(mutable)}; nothing was attached; put it into "
            "a tuple",
            mutable=mutable,
        )


def _refuse_attached(tensors: Mapping[str, Any]) -> None:
    for path, tensor in tensors.items():
        inside = [first for first, stop in _INSTALLED if first <= tensor.data_ptr() < stop]
        # A session that was dropped unclosed leaves its ranges here, and other memory may lie there by now. Ours begins there.
        if inside and tensor.untyped_storage().data_ptr() in inside:
            raise InvalidArgument(
                f"{path} lies in a session's memory already: the model, or a part of it, is attached; nothing "
                "changed; detach the model from that session first",
                path=path,
            )


def model_source(
    model: nn.Module,
    layers: Any,
    *,
    device: TargetDevice,
    memory: Callable[[int, int], Any],
    host: LockedMemory | None,
    kv: KVSpec,
    mutable: Sequence[str],
    weights: Any,
    names: Any,
    extra: Sequence[Any] = (),
    embedding: str = "device",
    hooks: bool = True,
    embedding_part: bool = False,
) -> LayerSource:
    """A torch model, on the CPU or on `device`. `memory(address, nbytes)` makes a uint8 tensor over a region.

    host: memory for the master copies that the device reads, if it needs such. kv: must fit the model. extra, embedding,
    hooks: see `Session.attach`. embedding_part: whether parameters outside of the layers have a master copy too, and
    may go with the layers (`pack.build(embedding_part=)`).
    """
    device.require_bytes()
    import torch

    from remap.model import bind as modules
    from remap.model import master as masters
    from remap.model import pack as packing
    from remap.model.embedding import HostEmbedding
    from remap.model.guards import Guards
    from remap.model.hooks import attach_hooks

    _check(embedding, mutable)
    path = modules.find_layers(model) if layers is None else layers
    decoder = modules.resolve_layers(model, path)
    found = decoder if not extra else modules.resolve_layers(model, [*decoder, *_modules(model, extra)])
    # From here on the objects count: the model may register them elsewhere while it is attached.
    everything = modules.tensors_of(model)
    # All tensors must be on the CPU, or all on the session's device: the first tensor decides which.
    ours = torch.device(device.torch_device)
    meant = next((tensor.device for tensor in everything.values()), ours)
    specs = modules.collect(model, found, device=meant if meant.type == "cpu" else ours)
    require_fit(kv, model, decoder)
    gathered = HostEmbedding(model, specs, device, host) if embedding == "host" else None
    if gathered is not None:
        specs = [spec for spec in specs if spec.path != gathered.path]
    _refuse_attached(everything)
    layout = packing.build(
        specs, layers=len(found), mutable=(*packing.DEFAULT_MUTABLE, *mutable), embedding_part=embedding_part
    )
    last = len(found) if len(layout.layers) > len(found) else None
    locked = host is not None and host.locks([part.nbytes for part in layout.layers])
    allocate = None if host is None else host.allocate if locked else host.ordinary
    master = masters.make_master(everything, layout, files=weights, names=names, allocate=allocate, locked=locked)
    layout = master.layout
    if host is not None and not locked:
        parts = [master.tensor(index) for index in range(len(layout.layers))]
        host.stage([(part.data_ptr(), part.numel()) for part in parts])
    installed: dict[str, Any] = {}

    def fill_rest(rest: int) -> None:
        modules.fill(layout.rest, everything, memory(rest, layout.rest.nbytes))
        device.wait_for_torch()  # passes may run on another stream than torch's current one

    def install(targets: Sequence[int], rest: int, tenant: Handle) -> None:
        storages = [memory(target, max(1, part.nbytes)) for target, part in zip(targets, layout.layers)]
        empty = torch.empty(0, dtype=torch.uint8, device=ours)  # there is no such region
        resident = memory(rest, layout.rest.nbytes) if layout.rest.nbytes else empty
        installed["storages"], installed["rest"] = storages, resident
        parts = zip((*storages, resident), layout.parts)
        installed["ranges"] = [(each.data_ptr(), each.data_ptr() + part.nbytes) for each, part in parts]
        try:
            modules.install(layout, everything, storages, resident)
            if gathered is not None:
                gathered.install()
            if hooks:
                put_in = attach_hooks(found, tenant, model)
                if last is not None:
                    owners = {placed.spec.path.rpartition(".")[0] for placed in layout.layers[last].tensors}
                    put_in.guard([model.get_submodule(path) for path in sorted(owners)], last)
                tenant.expect_whole_pass()
            installed["watch"] = modules.WriteWatch(model, found, layout, everything)
            installed["guards"] = Guards(model, layout, everything, master, tenant, written)
            installed["guards"].install()
            _INSTALLED.extend(installed["ranges"])
        except BaseException:  # the caller gives the memory up
            if tenant.hooks is not None:
                tenant.hooks.remove()
            modules.restore(layout, everything, storages, resident, device=meant)
            if gathered is not None:
                gathered.restore(meant)
            leave()
            raise

    def written(wanted: Collection[int]) -> dict[int, list[str]]:
        return installed["watch"].written_in(wanted)

    def leave() -> None:
        if "guards" in installed:
            installed["guards"].remove()
        _INSTALLED[:] = [each for each in _INSTALLED if each not in installed["ranges"]]
        installed.clear()

    def detach(away: Sequence[int], where: Any) -> None:
        if not installed:
            return
        leave_masters()
        # Only a layer that is not in place is taken from its master: a resident one may have been written since.
        master.refuse_change(away)
        lost = written(away)
        home = set(range(len(layout.layers))) - set(away) if away else set[int]()
        unseen = differing(home - written(home).keys() - master.changed(home).keys())
        shown = [("a value of state_dict()", value) for value in installed["guards"].shown.values()]
        sources = {index: master.tensor(index) for index in away if layout.layers[index].nbytes}
        try:
            modules.restore(
                layout, everything, installed["storages"], installed["rest"],
                others=(*modules.tensors_of(model).items(), *shown), sources=sources, device=where,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            needed = sum(part.nbytes for part in layout.parts)
            raise OutOfMemory(
                f"the model's {show_size(needed)} do not fit onto {where or device.torch_device} beside the session's "
                "own memory; the model has not changed; give device='cpu'",
                requested=needed,
                device=str(where or device.torch_device),
            ) from error
        if gathered is not None:
            gathered.restore(where)
        if lost or unseen:
            known = f"something wrote without a counter into {unseen}; " if unseen else ""
            warnings.warn(
                f"{known}writes into layers that were streamed, or loading, are lost, and what replaced their tensors may have "
                f"been made of other bytes: {lost or sorted(away)}",
                RuntimeWarning,
                stacklevel=4,
            )
        device.wait_for_torch()  # the memory copied from is about to be unmapped
        leave()

    def differing(wanted: Collection[int]) -> dict[int, list[str]]:
        parts = ((i, layout.layers[i]) for i in sorted(wanted) if layout.layers[i].nbytes)
        found = {i: modules.changed(part, everything, master.tensor(i)) for i, part in parts}
        return {layer: paths for layer, paths in found.items() if paths}

    def at_masters(away: Collection[int]) -> None:
        gone = {id(everything[each.spec.path]) for index in away for each in layout.layers[index].tensors}
        home = [(tensor, tensor.data, tensor.data) for tensor in everything.values() if id(tensor) not in gone]
        installed["moved"], installed["guards"].writing = home, True
        modules.point([(layout.layers[i], master.tensor(i)) for i in sorted(away)], everything, installed["moved"])

    def leave_masters() -> list[str]:
        lost = {id(tensor) for tensor in modules.put_back(installed.get("moved", []))}
        installed["moved"], installed["guards"].writing = [], False
        return [path for path, tensor in everything.items() if id(tensor) in lost]

    def renew(away: Collection[int]) -> list[str]:
        lost = leave_masters()
        installed["watch"].forget()
        replaced = written(range(len(layout.layers)))  # such layers stay at home
        for index, part in enumerate(layout.layers):
            ours = tuple(each for each in part.tensors if each.spec.path not in replaced.get(index, ()))
            if index not in away:
                modules.fill(replace(part, tensors=ours), everything, master.tensor(index))
        device.wait_for_torch()
        return lost

    if gathered is not None:
        gathered.prepare()
    return LayerSource(
        layer_bytes=tuple(part.nbytes for part in layout.layers),
        kv_layers=len(decoder),
        master_addresses=tuple(
            master.tensor(i).data_ptr() if part.nbytes else 0 for i, part in enumerate(layout.layers)
        ),
        rest_bytes=layout.rest.nbytes,
        fill_rest=fill_rest,
        install=install,
        detach=detach,
        watch=lambda wanted: written(wanted) | master.changed(wanted),
        writes=lambda wanted, replaced: installed["watch"].written_in(wanted, replaced=replaced),
        verify=master.refuse_change if master.files else None,
        keep_alive=(master, layout),
        modules=tuple(found),
        differing=differing,
        embedding_part=last,
        at_masters=at_masters,
        renew=None if master.files else renew,
    )


def _modules(model: nn.Module, extra: Sequence[Any]) -> list[nn.Module]:
    """The modules that stream besides the decoder's layers. extra: modules, or their dotted paths."""
    found = []
    for each in (extra,) if isinstance(extra, str) else extra:
        if isinstance(each, str):
            try:
                each = model.get_submodule(each)
            except AttributeError as error:
                raise InvalidArgument(
                    f"{type(model).__name__} has no module {shown(each)}; nothing was attached", path=each
                ) from error
        found.append(each)
    return found
