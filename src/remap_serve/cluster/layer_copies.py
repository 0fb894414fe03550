# SPDX-License-Identifier: Apache-2.0
"""Layers that come home from other instances of the group, in pieces behind activations: which instance sends which bytes when.

    stage that lacks a layer   Want, to the stage that control named as its source
    source                     LayerPart after LayerPart; or Cannot: its layer streams, loads or is elsewhere
    stage that lacks it        writes them where the layer lies (`advanced.fill_layer`); with the last byte it has the layer

A source sends one layer after another, in the order in which it was asked. No instance waits for a layer: one that does not come,
the host's master copy has (`own_layers`), and control gives a restoration up that does not go on.

The loop thread of the instance owns this object; `sent` is called by it too, when the sender thread says so.
Source: KunServe, section 4.4 (pull from instances, in chunks behind activations).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

from remap import advanced
from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster.wire import Cannot, LayerPart, WantLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from remap import Session
    from remap_serve.cluster.wire import Message

__all__ = ["Came", "LayerCopies"]


class Came(NamedTuple):
    """The result of a message: this layer has all of its bytes, or (not whole) its source cannot send it."""

    layer: int
    whole: bool


class _Send(NamedTuple):
    """The rest of a layer to send, from `offset` on."""

    to: int
    want: WantLayer
    offset: int


class LayerCopies:
    """One stage's part. layer_bytes: of each layer. send(rank, message, payload): enqueue; `sent` is called for each payload, in
    their order. chunk_bytes: of a piece; while fewer are on their way from here, the next goes."""

    def __init__(
        self,
        session: Session,
        name: str,
        layer_bytes: Callable[[int], int],
        send: Callable[[int, Message, torch.Tensor | None], None],
        chunk_bytes: int,
    ) -> None:
        self._session, self._name, self._layer_bytes = session, name, layer_bytes
        self._send = send
        self.chunk_bytes = chunk_bytes
        self._epoch = 0
        self._wanted: dict[int, tuple[int, int]] = {}  # layer -> its source, and the bytes that have come
        self._asked: deque[_Send] = deque()
        self._sending: deque[int] = deque()  # bytes of the pieces that have not left

    # -- as the one that lacks layers ----------------------------------------------------------------------------------------

    def want(self, epoch: int, sources: Mapping[int, int]) -> None:
        """Ask for these layers, for which there are pages: layer -> rank."""
        self._epoch = epoch
        for layer, rank in sources.items():
            self._wanted[layer] = rank, 0
            self._send(rank, WantLayer(epoch, layer, self._layer_bytes(layer)), None)

    def drop(self, epoch: int) -> None:
        """No stage needs the layers asked for in this epoch, here or elsewhere."""
        self._asked = deque(each for each in self._asked if each.want.epoch != epoch)
        if self._epoch == epoch:
            self._wanted.clear()

    # -- messages ------------------------------------------------------------------------------------------------------------

    def on(self, source: int, message: WantLayer | LayerPart | Cannot, payload: torch.Tensor | None) -> Came | None:
        """Take a message. Returns its result, if it has one."""
        match message:
            case WantLayer():
                self._asked.append(_Send(source, message, 0))
            case LayerPart() if payload is not None and self._expects(source, message):
                return self._fill(message, payload)
            case Cannot() if self._expects(source, message):
                del self._wanted[message.layer]
                return Came(message.layer, whole=False)
        return None

    def _expects(self, source: int, message: LayerPart | Cannot) -> bool:
        return message.epoch == self._epoch and self._wanted.get(message.layer, (-1,))[0] == source

    def _fill(self, part: LayerPart, payload: torch.Tensor) -> Came | None:
        layer, nbytes, address = part.layer, payload.numel(), payload.data_ptr()
        while not advanced.fill_layer(self._session, self._name, layer, part.offset, address, nbytes):
            advanced.settle(self._session)  # its addresses show its pages in a moment
        source, come = self._wanted[layer]
        self._wanted[layer] = source, come + nbytes
        if come + nbytes < self._layer_bytes(layer):
            return None
        del self._wanted[layer]
        try:
            advanced.filled(self._session, self._name, layer)
        except InvalidState:
            return Came(layer, whole=False)  # a change of the session that failed has overwritten some
        return Came(layer, whole=True)

    # -- as a source ---------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._asked) and sum(self._sending) < self.chunk_bytes

    def step(self) -> int:
        """Send a piece: its bytes."""
        to, want, offset = self._asked.popleft()
        nbytes = min(self.chunk_bytes, want.nbytes - offset)
        payload = torch.empty(nbytes, dtype=torch.uint8)
        try:
            advanced.read_layer(self._session, self._name, want.layer, offset, payload.data_ptr(), nbytes)
        except (InvalidState, InvalidArgument):
            self._send(to, Cannot(want.epoch, want.layer), None)
            return 0
        self._sending.append(nbytes)
        self._send(to, LayerPart(want.epoch, want.layer, offset), payload)
        if offset + nbytes < want.nbytes:
            self._asked.appendleft(_Send(to, want, offset + nbytes))
        return nbytes

    def sent(self) -> None:
        """The oldest piece that has not left has left."""
        if self._sending:
            self._sending.popleft()
