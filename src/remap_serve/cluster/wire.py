# SPDX-License-Identifier: Apache-2.0
"""The messages between instances of a cluster: msgpack, one struct for each message.

The *ring* joins the stages of a group: each stage sends to the next, the last to the head. So everything that concerns the group
passes all stages in one order: a block that is reused after a message cannot be read by a microbatch before it. The *mesh*
joins all instances of one change, each with each, until KV has moved; in a group of several, until that ends: its layers come
home by it. Ranks are places in the ring or in the mesh.
"""

from __future__ import annotations

import msgspec

from remap.errors import InvalidArgument, InvalidState
from remap_serve.cluster.stage import Choice, Row
from remap_serve.engine.request import Request, SamplingParams, Sequence, TokenLogprobs

__all__ = [
    "Cannot",
    "Chosen",
    "End",
    "Forget",
    "Handed",
    "Handover",
    "KVComplete",
    "LayerPart",
    "Message",
    "Microbatch",
    "Move",
    "Over",
    "Piece",
    "Room",
    "Shrink",
    "WantLayer",
    "decode",
    "encode",
    "require_sendable",
]

_MOST = 1 << 63


def require_sendable(request: Request) -> None:
    """Raises InvalidArgument (fields field, value) for numbers of more than 64 bits, which messages cannot have."""
    sampling = request.sampling
    numbers = {"max_tokens": [sampling.max_tokens], "top_k": [sampling.top_k], "seed": [sampling.seed]}
    numbers["stop_token_ids"] = list(sampling.stop_token_ids)
    numbers["logit_bias"] = [token for token, _ in sampling.logit_bias]
    for field, values in numbers.items():
        for value in values:
            if not -_MOST <= value < _MOST:
                raise InvalidArgument(
                    f"request {request.id!r}: {field} must fit into 64 bits, got {value}; nothing was queued",
                    field=field,
                    value=value,
                )


class Microbatch(msgspec.Struct, frozen=True, tag=True):
    """Ring: compute these rows; the hidden states of the stage before come along. shape and dtype: theirs."""

    lane: int
    rows: list[Row]
    shape: list[int] = []
    dtype: str = ""


class Chosen(msgspec.Struct, frozen=True, tag=True):
    """Ring, to the head: the tokens of this lane's microbatch, and the logprobs noted in it."""

    lane: int
    choice: Choice


class Room(msgspec.Struct, frozen=True, tag=True):
    """Ring, to the head: this stage has places for `blocks` logical blocks. leaving: it will have, when the head has answered
    with Shrink: the epoch for which layers come home; else 0."""

    stage: int
    blocks: int
    leaving: int = 0


class Shrink(msgspec.Struct, frozen=True, tag=True):
    """Ring: logical blocks from `limit` on end, since layers come home for this epoch; these (old, new) live ones change their
    number."""

    epoch: int
    limit: int
    moves: list[tuple[int, int]]


class End(msgspec.Struct, frozen=True, tag=True):
    """Ring: nothing comes after this; the stages become the members prepared for this epoch."""

    epoch: int


class Handed(msgspec.Struct, frozen=True):
    """A request that another head goes on with. to: the rank in the mesh of that head. blocks: logical ones of the old group,
    of the first `computed` of its tokens, prompt and `tokens` together. noted: logprobs that its callers have not got yet."""

    id: str
    attempt: int
    to: int
    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int]
    computed: int
    blocks: list[int]
    noted: dict[int, TokenLogprobs] = {}

    @classmethod
    def of(cls, sequence: Sequence, attempt: int, to: int, block_tokens: int) -> Handed:
        """A sequence between two passes."""
        request = sequence.request
        return cls(
            request.id,
            attempt,
            to,
            list(request.prompt),
            request.sampling,
            sequence.tokens[sequence.prompt_tokens :],
            sequence.computed,
            sequence.blocks[: -(-sequence.computed // block_tokens)],
            dict(sequence.noted),
        )

    @property
    def length(self) -> int:
        """Tokens known: those of the prompt, and those generated."""
        return len(self.prompt) + len(self.tokens)

    @property
    def request(self) -> Request:
        """As it was submitted."""
        return Request(self.id, tuple(self.prompt), self.sampling)


class Handover(msgspec.Struct, frozen=True, tag=True):
    """Mesh, from the head of a group that ends, to all: its unfinished requests, in the order of their age."""

    requests: list[Handed]


class Move(msgspec.Struct, frozen=True, tag=True):
    """Mesh, from the request's new head, to all: its KV goes to these logical blocks of the new group."""

    id: str
    blocks: list[int]


class Piece(msgspec.Struct, frozen=True, tag=True):
    """Mesh: KV of the layers first <= i < end in these logical blocks of the new group; owner: rank of its head; total: how many
    blocks the request has. shape and dtype: of the bytes that come along."""

    id: str
    owner: int
    first: int
    end: int
    blocks: list[int]
    total: int
    shape: list[int] = []
    dtype: str = ""


class KVComplete(msgspec.Struct, frozen=True, tag=True):
    """Mesh, to the request's new head: this stage has all of its KV."""

    id: str


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Mesh, from the request's new head, to all: no stage needs the KV that it had."""

    id: str


class Over(msgspec.Struct, frozen=True, tag=True):
    """Mesh, from a new head, to all: it waits for no KV any more."""


class WantLayer(msgspec.Struct, frozen=True, tag=True):
    """Mesh, to a stage that has this layer: send its `nbytes` bytes; they are to come home for this epoch."""

    epoch: int
    layer: int
    nbytes: int


class LayerPart(msgspec.Struct, frozen=True, tag=True):
    """Mesh, to who wants the layer: its bytes from `offset` on come along. In order."""

    epoch: int
    layer: int
    offset: int


class Cannot(msgspec.Struct, frozen=True, tag=True):
    """Mesh, to who wants the layer: its bytes cannot be read here."""

    epoch: int
    layer: int


Message = (
    Microbatch
    | Chosen
    | Room
    | Shrink
    | End
    | Handover
    | Move
    | Piece
    | KVComplete
    | Forget
    | Over
    | WantLayer
    | LayerPart
    | Cannot
)

encode = msgspec.msgpack.Encoder().encode
_DECODER = msgspec.msgpack.Decoder(Message)


def decode(header: bytes) -> Message:
    """Raises InvalidState (field why) for what is no such message."""
    try:
        return _DECODER.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidState(
            f"a header of {len(header)} bytes is no message: {error}; nothing changed; let all instances be of one release",
            why=str(error),
        ) from error
