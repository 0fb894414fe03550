# SPDX-License-Identifier: Apache-2.0
"""One pass on a device: batch tensors staged and copied, decodes from recordings, prompts launched one kernel at a time.

Everything is enqueued on one stream, the runner's own, between entering and leaving `tenant.forward(stream=...)`; layers
that are streamed are waited for by the stream, not by the host. The host waits once a step, for the tokens: their choice
(greedy) is made on the device, one copy fetches them, one event says that they are there. A step that yields no token
does not wait at all.

    decodes only           a bucket of `CapturedDecode`: whole while nothing is streamed, else piecewise
    prompts, or a mixture  eager: decodes first, then chunks, one flat batch

The same code runs over CPU tensors, without graphs and with torch's attention; that is how it is tested. The part that needs a
GPU (streams, page-locked staging, graphs, kernels) is not yet run on one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from remap import advanced
from remap.errors import InvalidArgument
from remap.internals import internals
from remap_serve.engine.captured import CapturedDecode
from remap_serve.engine.graphs import EagerGraphs, TorchCudaGraphs
from remap_serve.engine.inputs import TokenInputs
from remap_serve.engine.models import Decoder, decoder_of, static_rotary
from remap_serve.engine.paged import choose_attention, triton_missing
from remap_serve.engine.runner import check_fits
from remap_serve.engine.sampling import note_prompt, sample
from remap_serve.engine.streaming import streamed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from remap_serve.engine.chunk import Chunk
    from remap_serve.engine.graphs import Graphs

__all__ = ["GRAPHS", "GpuRunner"]

GRAPHS = ("auto", "cuda", "eager", "off")


class GpuRunner:
    """Runs a transformers causal LM over the tenant's paged KV on the KV tensors' device, without gradients.

    tenant: `forward(phase, tokens[, stream])`, `wait(layer)`, `done(layer)`, `streaming`, `kv.tensors`. session: None, or
    what `settle()` quiesces before anything is recorded. max_num_seqs, max_batch_tokens: the scheduler's. max_model_len:
    most tokens of a sequence (default: as many as the model and the KV region can hold). attention: see `paged`. graphs: "cuda",
    "eager" (recordings that are called again), "off", or "auto" (cuda on a GPU, eager on the CPU). staging: how batch
    tensors reach the device: "copy", "kernel" (see `paged_triton.fetch`) or "auto" (kernel on a GPU with Triton). stream: a
    torch stream to work on (default: a new one).

    `stats` counts passes by kind (whole, piecewise, eager) and recordings.
    Raises InvalidArgument if the KV tensors do not fit the model, or an argument is unknown or cannot be had here.
    """

    def __init__(
        self,
        model: nn.Module,
        tenant: Any,
        *,
        session: Any = None,
        max_num_seqs: int = 32,
        max_batch_tokens: int = 512,
        max_model_len: int | None = None,
        attention: str = "auto",
        graphs: str = "auto",
        staging: str = "auto",
        stream: Any = None,
    ) -> None:
        tensors = tenant.kv.tensors
        max_blocks, block_tokens = tensors[0].shape[1:3]
        self.device = tensors[0].device
        self.tenant = tenant
        self.decoder = _decoder_for(model, self.device)
        check_fits(self.decoder, model, tenant)
        if getattr(tenant, "layers", 0) > len(self.decoder.layers):
            raise InvalidArgument(
                "the GPU runner keeps the head resident, but the tenant streams it; attach without extra_layers",
                layers=len(self.decoder.layers),
                tenant_layers=tenant.layers,
            )
        self.max_tokens = min(self.decoder.max_tokens, max_blocks * block_tokens)
        if max_model_len is not None:
            self.max_tokens = min(self.max_tokens, max_model_len)
        if self.max_tokens < 1 or max_num_seqs < 1 or max_batch_tokens < 1 or max_blocks * block_tokens >= 2**31:
            raise InvalidArgument(
                f"expected max_model_len, max_num_seqs, max_batch_tokens >= 1 and fewer than 2^31 KV slots, got "
                f"{max_model_len}, {max_num_seqs}, {max_batch_tokens}, {max_blocks * block_tokens}; nothing was created",
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_batch_tokens=max_batch_tokens,
                slots=max_blocks * block_tokens,
            )
        width = -(-self.max_tokens // block_tokens)
        by_kernel = _by_kernel(staging, tensors[0])
        self.attention = choose_attention(
            attention,
            tensors,
            self.decoder.heads,
            self.decoder.scale,
            max_blocks=min(max_blocks, max_num_seqs * width),
            max_tiles=max_batch_tokens + max_num_seqs,
            by_kernel=by_kernel,
        )
        self.stream = stream
        if stream is None and self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
        # Recording reads every layer's memory, so nothing may be on its way to being mapped elsewhere meanwhile. A tenant of
        # a session can be remapped by hand even if this engine was given no session.
        self._session = session if session is not None else getattr(internals(tenant), "session", None)
        self._layers = len(self.decoder.layers)
        self._decodes = TokenInputs(
            self.device, max_num_seqs, max_num_seqs, block_tokens, (max_num_seqs, width), by_kernel=by_kernel
        )
        self._mixed = TokenInputs(self.device, max_batch_tokens, max_num_seqs, block_tokens, by_kernel=by_kernel)
        assert self._decodes.table is not None
        self._table = self._decodes.table
        self._fetched = torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=self.stream is not None)
        self._arrived = None if self.stream is None else torch.cuda.Event()
        self.stats = {"whole": 0, "piecewise": 0, "eager": 0, "captured": 0}
        if self.stream is not None:
            # Weights may still be on their way on the stream that the model was loaded on.
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._on_stream(), torch.inference_mode():
            self.captured = CapturedDecode(
                self.decoder, self.attention, self._decodes, self._graphs(graphs), max_num_seqs
            )

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
        """One pass. Writes the chunks' KV; returns the chunks that yield a token, and their tokens.

        Whatever raises leaves every sequence as it was (an error inside the pass abandons it), and the pass may be run
        again.
        """
        decodes = [chunk for chunk in chunks if chunk.decodes]
        prompts = [chunk for chunk in chunks if not chunk.decodes]
        with self._on_stream():
            if prompts:
                return self._run_mixed(decodes, prompts)
            return self._run_decodes(decodes)

    @torch.inference_mode()
    def prepare(self, batch_sizes: Sequence[int] | None = None, *, piecewise: bool = True) -> None:
        """Record the buckets of these batch sizes (default: all), whole and, unless told not to, piecewise as well.

        Otherwise each is recorded when it is first needed. Not while a pass is open.
        """
        sizes = self.captured.buckets if batch_sizes is None else batch_sizes
        with self._on_stream():
            for bucket in sorted({self.captured.bucket(size) for size in sizes}, reverse=True):
                for kind in (False, True) if piecewise else (False,):
                    self._record(bucket, kind)

    def _run_decodes(self, chunks: list[Chunk]) -> tuple[list[Chunk], list[int]]:
        bucket = self.captured.bucket(len(chunks))
        self._record(bucket, self.tenant.streaming)
        inputs = self._decodes
        inputs.staged.writable()
        inputs.fill_decodes(chunks, self._table.rows_of([chunk.sequence for chunk in chunks]), bucket)
        with self._pass("decode", len(chunks), chunks):
            inputs.publish()
            self.attention.plan_decode(chunks, bucket)
            # Entering the pass may have finished a change that had failed before. A batch not recorded for the kind of
            # pass that it is now runs unrecorded, this once.
            piecewise = self.tenant.streaming
            self.captured.run(bucket, piecewise=piecewise, tenant=self.tenant)
            self._fetch(self.captured.tokens, len(chunks))
        self.stats["piecewise" if piecewise else "whole"] += 1
        tokens = self._tokens(len(chunks))
        rows = [row for row, chunk in enumerate(chunks) if chunk.samples]
        hidden = self.captured.hidden
        return self._chosen([chunks[row] for row in rows], [tokens[row] for row in rows], hidden, rows)

    def _run_mixed(self, decodes: list[Chunk], prompts: list[Chunk]) -> tuple[list[Chunk], list[int]]:
        chunks = [*decodes, *prompts]
        total, count = sum(chunk.count for chunk in chunks), len(decodes)
        if total > self._mixed.tokens:
            raise InvalidArgument(
                f"a pass of {total} tokens, the runner was made for {self._mixed.tokens}; nothing was computed, raise "
                "max_batch_tokens",
                tokens=total,
                limit=self._mixed.tokens,
            )
        inputs = self._mixed
        inputs.staged.writable()
        self._decodes.staged.writable()
        rows = self._table.rows_of([chunk.sequence for chunk in chunks])
        inputs.fill_decodes(decodes, rows[:count], count)
        inputs.fill_prefills(prompts, count)
        ends, scored, last = [], [], count - 1
        for chunk in prompts:
            if chunk.scores_prompt:
                scored.append((chunk, last + 1))
            last += chunk.count
            ends.append(last)
        picked = [row for row, chunk in enumerate(decodes) if chunk.samples]
        picked += [row for row, chunk in zip(ends, prompts, strict=True) if chunk.samples]
        inputs.fill_picked(picked)
        samplers = [chunk for chunk in chunks if chunk.samples]
        with self._pass("mixed" if decodes else "prefill", total, chunks):
            self._decodes.publish_table()
            inputs.publish()
            self.attention.plan_decode(decodes, None)
            self.attention.plan_prefill(prompts, rows[count:], count)
            hidden, rotary = self.decoder.embed(inputs.ids[:total], inputs.positions[:total])
            for layer in range(self._layers):
                self.tenant.wait(layer)
                hidden = self.decoder.layer(layer, hidden, rotary, partial(self._attend, layer, total, count))
                self.tenant.done(layer)
            states, hidden = hidden, hidden.index_select(0, inputs.picked[: len(picked)])
            if samplers:
                self._fetch(self.decoder.head(hidden).argmax(-1), len(samplers))
        self.stats["eager"] += 1
        for chunk, row in scored:
            note_prompt(chunk, states[row : row + chunk.count], self.decoder.head)
        tokens = self._tokens(len(samplers)) if samplers else []
        return self._chosen(samplers, tokens, hidden, list(range(len(samplers))))

    def _attend(
        self, layer: int, total: int, decodes: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        inputs, table = self._mixed, self._table.device
        self.attention.write(layer, k, v, inputs.slots[:total])
        out = torch.empty_like(q)
        if decodes:
            rows, lens = inputs.rows[:decodes], inputs.lens[:decodes]
            self.attention.decode(layer, q[:decodes], table, rows, lens, out[:decodes])
        self.attention.prefill(layer, q, table, out)
        return out.flatten(1)

    def _record(self, bucket: int, piecewise: bool) -> None:
        """Record a bucket between passes, on padding only, while no call changes a mapping."""
        if self.captured.ready(bucket, piecewise):
            return
        if self._session is not None:
            advanced.settle(self._session)
        self._decodes.staged.writable()
        self._decodes.fill_decodes([], [], bucket)
        self._decodes.publish()
        self.attention.plan_decode([], bucket)
        self.captured.prepare(bucket, piecewise)
        self.stats["captured"] = self.captured.captures

    def _pass(self, phase: str, tokens: int, chunks: Sequence[Chunk]) -> AbstractContextManager[Any]:
        reads = streamed(chunks)
        if self.stream is None:
            return self.tenant.forward(phase=phase, tokens=tokens, streamed=reads)
        return self.tenant.forward(phase=phase, tokens=tokens, stream=self.stream, streamed=reads)

    def _on_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _fetch(self, tokens: torch.Tensor, count: int) -> None:
        """Enqueue the one copy of a step from the device."""
        self._fetched[:count].copy_(tokens[:count], non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _tokens(self, count: int) -> list[int]:
        """Wait for what `_fetch` enqueued: the one wait of a step."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._fetched[:count].tolist()

    def _chosen(
        self, chunks: list[Chunk], tokens: list[int], hidden: torch.Tensor, rows: list[int]
    ) -> tuple[list[Chunk], list[int]]:
        """The greedy tokens, with those of requests that ask for more (`SamplingParams.plain`) in their place: their logits are
        computed again, from the rows of `hidden` that the head was given, and fetched."""
        drawn = [index for index, chunk in enumerate(chunks) if not chunk.sequence.request.sampling.plain]
        if drawn:
            logits = self.decoder.head(hidden[[rows[index] for index in drawn]]).float().cpu()
            for index, token in zip(drawn, sample([chunks[index] for index in drawn], logits), strict=True):
                tokens[index] = token
        return chunks, tokens

    def _graphs(self, name: str) -> Graphs | None:
        if name not in GRAPHS:
            raise InvalidArgument(f"graphs must be one of {GRAPHS}, got {name!r}; nothing was created", graphs=name)
        capturable = self.stream is not None and self.attention.capturable and static_rotary(self.decoder)
        if name == "cuda" and not capturable:
            raise InvalidArgument(
                f"CUDA graphs need KV on a GPU, an attention other than 'torch' and rotary angles that do not depend on "
                f"the batch; here: device {self.device}, attention {self.attention.name!r}; nothing was created",
                device=str(self.device),
                attention=self.attention.name,
            )
        if name == "off" or (name == "auto" and self.stream is not None and not capturable):
            return None
        return TorchCudaGraphs(self.stream) if name in ("auto", "cuda") and capturable else EagerGraphs()


def _by_kernel(staging: str, kv: torch.Tensor) -> bool:
    missing = triton_missing(kv)
    if staging not in ("auto", "copy", "kernel") or (staging == "kernel" and missing is not None):
        raise InvalidArgument(
            f"staging must be 'auto', 'copy' or 'kernel', got {staging!r}"
            f"{'' if missing is None else f' (kernel cannot be had: {missing})'}; nothing was created",
            staging=staging,
        )
    return staging == "kernel" or (staging == "auto" and kv.device.type == "cuda" and missing is None)


def _decoder_for(model: nn.Module, device: torch.device) -> Decoder:
    """The forward with fused kernels where it knows the model and Triton is there, else the plain one."""
    decoder = decoder_of(model)
    if device.type == "cuda" and find_spec("triton") is not None:
        from remap_serve.engine.fused_triton import FusedLlama
        from remap_serve.engine.models import LlamaLike

        if isinstance(decoder, LlamaLike) and FusedLlama.fits(model):
            return FusedLlama(model)
    return decoder
