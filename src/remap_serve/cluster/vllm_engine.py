# SPDX-License-Identifier: Apache-2.0
"""vLLM as the engine of an instance: AsyncLLM with remap's worker and scheduler, so that its KV cache grows into its layers.

vLLM schedules, batches and computes; `vllm_sampling` chooses the tokens. An answer is that of vLLM greedy, and with a temperature
or penalties that of the reference engine on vLLM's logits: the same after a restart elsewhere, but for the rounding of
another batch.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
import vllm.exceptions
from vllm import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.sampling_params import SamplingParams as VllmSampling
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

import remap
from remap.adapters.vllm import SCHEDULER, WORKER
from remap.errors import InvalidArgument, InvalidState
from remap_serve.engine.request import TokenLogprobs
from remap_serve.policy.activations import Line
from remap_serve.policy.cluster.placement import Layer, Offer, ServedLayers

from .engine_instance import EngineInstance, EngineTokens
from .messages import Description, Fingerprint
from .vllm_sampling import OWNER, PROCESSOR, chosen_by_us

if TYPE_CHECKING:
    from remap_serve.engine.request import Request

__all__ = ["VllmEngine", "make"]

OFFERS_S = 1.0
"""Between two looks at what an engine that computes may grow by: each waits for a pass."""

STARTS, START_AGAIN_S = 2, 15.0
"""An instance that is started again may find the memory taken: what it had before takes some seconds to end."""

REFUSED: tuple[type[Exception], ...] = (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))
"""Errors of vLLM's for a request that is not as it must be."""

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Of each file of weights, by which two sets are told apart."""


def make(
    name: str,
    model: str,
    memory: int | None,
    kv_bytes: int,
    threads: int,
    max_num_seqs: int,
    max_batch_tokens: int,
    positions: int,
    engine_args: Mapping[str, Any],
) -> EngineInstance:
    """The instance of a process of its own.

    model: a folder, or a hub name. memory: bytes for weights and KV together; None: weights, and kv_bytes. positions: tokens of
    a prompt and its answer, at most. threads: that compute. engine_args: vLLM's AsyncEngineArgs, beyond these and before them.

    Raises InvalidArgument (fields field, value) for arguments that vLLM does not take, and what remap's adapter raises, by way of
    vLLM's own error: InvalidState (fields instance, cause).
    """
    for variable, value in (
        ("OMP_NUM_THREADS", str(threads)),
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),  # instances of one machine would all bind to its first cores
        ("VLLM_USE_V2_MODEL_RUNNER", "0"),  # it has no logits processors
    ):
        os.environ.setdefault(variable, value)
    os.environ[OWNER] = str(os.getpid())
    given = dict(engine_args)
    settings = {
        **({} if memory is None else {"capacity": memory}),
        **_part(given, "additional_config").pop("remap", {}),
    }
    wanted: dict[str, Any] = {
        "model": model,
        "max_model_len": positions,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_batch_tokens,
        "kv_cache_memory_bytes": kv_bytes,
        "worker_cls": WORKER,
        "scheduler_cls": SCHEDULER,
        "distributed_executor_backend": "mp",
        **given,
        "logits_processors": [PROCESSOR, *given.get("logits_processors", ())],
        "additional_config": {**_part(given, "additional_config"), "remap": settings},
    }

    async def start() -> VllmEngine:
        try:
            arguments = AsyncEngineArgs(**wanted)
        except (TypeError, ValueError) as error:  # pydantic's are ValueErrors
            raise _not_taken(error, given) from error
        for left in reversed(range(STARTS)):
            figures = _Figures()
            try:
                engine = AsyncLLM.from_engine_args(arguments, stat_loggers=[figures.of])
                (manifest,) = await engine.collective_rpc("remap_manifest")
                break
            except ValueError as error:  # of its configuration
                raise _not_taken(error, given) from error
            except Exception as error:  # vLLM's errors at a start have no common type
                if not left:
                    raise InvalidState(
                        f"the vLLM of instance {name!r} did not start: {type(error).__name__}: {error}; its log says why",
                        instance=name,
                        cause=type(error).__name__,
                    ) from error
                await asyncio.sleep(START_AGAIN_S)
        return VllmEngine(engine, figures, manifest, model)

    return EngineInstance(name, start)


def _not_taken(error: Exception, given: Mapping[str, Any]) -> InvalidArgument:
    return InvalidArgument(
        f"engine-args: vLLM does not take them: {error}; nothing was started", field="engine-args", value=dict(given)
    )


def _part(given: Mapping[str, Any], key: str) -> dict[str, Any]:
    return dict(given.get(key) or {})


class _Figures:
    """vLLM's statistics of each pass, as far as an instance reports them."""

    def __init__(self) -> None:
        self.running = 0
        self.counts = dict.fromkeys(("passes", "preemptions", "started_requests", "queue_s"), 0.0)

    def of(self, vllm_config: Any, engine_index: int = 0) -> StatLoggerBase:
        """A logger of vLLM's that writes them."""
        figures = self

        class Logger(StatLoggerBase):
            def __init__(self) -> None: ...

            def log_engine_initialized(self) -> None: ...

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                figures.note(scheduler_stats, iteration_stats)

        return Logger()

    def note(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.running = scheduler.num_running_reqs
            self.counts["passes"] += 1
        if iteration is not None:
            self.counts["preemptions"] += iteration.num_preempted_reqs
            for ended in iteration.finished_requests:
                self.counts["started_requests"] += 1
                self.counts["queue_s"] += ended.queued_time


class _Answer:
    """A request in vLLM; `first`: tokens of its answer that the caller has, and that come again."""

    def __init__(self, engine: AsyncLLM, id: str, queue: Any, request: Request, first: int) -> None:
        self._engine, self._id, self._queue, self._request, self._first = engine, id, queue, request, first

    async def next(self) -> EngineTokens:
        """See `EngineAnswer`."""
        while True:
            output = self._queue.get_nowait() or await self._queue.get()
            (made,) = output.outputs
            skipped = min(self._first, len(made.token_ids))
            self._first -= skipped
            tokens = tuple(made.token_ids)[skipped:]
            if made.finish_reason not in (None, "stop", "length"):
                raise InvalidState(
                    f"vLLM ended request {self._request.id!r} by itself: {made.finish_reason}; its log may say why",
                    request=self._request.id,
                    reason=made.finish_reason,
                )
            if tokens or made.finish_reason is not None:
                return EngineTokens(
                    tokens, made.finish_reason, self._noted(made, tokens, skipped), self._noted_of_prompt(output)
                )

    async def abort(self) -> None:
        """See `EngineAnswer`."""
        await self._engine.abort(self._id)

    def _noted(self, made: Any, tokens: Sequence[int], skipped: int) -> tuple[TokenLogprobs, ...]:
        count = self._request.sampling.logprobs
        if count is None:
            return ()
        return tuple(_noted(token, found, count) for token, found in zip(tokens, made.logprobs[skipped:], strict=True))

    def _noted_of_prompt(self, output: Any) -> tuple[TokenLogprobs, ...]:
        found, sampling = output.prompt_logprobs, self._request.sampling
        if not found or not sampling.prompt_logprobs:
            return ()
        pairs = zip(self._request.prompt[1:], found[1:], strict=True)
        return tuple(_noted(token, each, sampling.logprobs or 0) for token, each in pairs)


def _noted(token: int, found: Mapping[int, Any], count: int) -> TokenLogprobs:
    """vLLM's logprobs of one place: this token's, and those of the `count` likeliest."""
    likely = sorted(((other, float(each.logprob)) for other, each in found.items()), key=lambda one: (-one[1], one[0]))
    return TokenLogprobs(token, float(found[token].logprob), tuple(likely[:count]))


class VllmEngine:
    """An `engine_instance.SelfSchedulingEngine`. figures: of a logger that the engine has. manifest: of its worker."""

    def __init__(self, engine: AsyncLLM, figures: _Figures, manifest: Mapping[str, Any], model: str) -> None:
        self._engine, self._figures, self._manifest = engine, figures, dict(manifest)
        self._model = model
        self._offers: tuple[Offer, ...] = ()
        self._looked_s = float("-inf")
        self._look: asyncio.Task[None] | None = None

    @property
    def running(self) -> int:
        """See `SelfSchedulingEngine`."""
        return self._figures.running

    @property
    def offers(self) -> tuple[Offer, ...]:
        """As of a moment ago; while requests run, asking for them begins another look."""
        now_s = asyncio.get_running_loop().time()
        if (self.running or not self._offers) and now_s - self._looked_s >= OFFERS_S and self._look is None:
            self._looked_s = now_s
            self._look = asyncio.ensure_future(self._look_at_offers())
        return self._offers

    @property
    def failure(self) -> BaseException | None:
        """See `SelfSchedulingEngine`."""
        return self._engine.dead_error if self._engine.errored else None

    @property
    def counts(self) -> Mapping[str, float]:
        """passes, preemptions; and of the requests that have ended started_requests and queue_s, all together."""
        return self._figures.counts

    def describe(self, name: str) -> Description:
        """See `SelfSchedulingEngine`. Of its first blocks one is vLLM's own, which no request gets."""
        sizes, config = self._manifest, self._engine.vllm_config
        layers, block = sizes["layers"], sizes["block_bytes"]
        block_tokens = config.cache_config.block_size
        each, rest = divmod(sizes["weight_bytes"], layers)
        nothing = Line(0.0, 0.0)  # control compares no groups of it
        kv = -(-block // (block_tokens * layers))
        model = ServedLayers(tuple(Layer(each + (rest if not layer else 0), kv, nothing) for layer in range(layers)))
        memory = sizes["weight_bytes"] + (sizes["first_blocks"] - 1) * kv * block_tokens * layers
        text = json.dumps(config.model_config.hf_config.to_dict(), sort_keys=True, default=str)
        fingerprint = Fingerprint(
            hashlib.sha256(text.encode()).hexdigest(),
            str(config.model_config.dtype).removeprefix("torch."),
            f"{remap.__version__} on vLLM {vllm.__version__}",
            layers,
            _weights_of(self._model),
            block_tokens,
        )
        return Description(name, fingerprint, model, memory)

    async def start(self, request: Request, attempt: int, tokens: Sequence[int]) -> _Answer:
        """See `SelfSchedulingEngine`."""
        config, sampling = self._engine.vllm_config.model_config, request.sampling
        request.require_fitting(config.get_vocab_size(), config.max_model_len - 1)  # which counts the last token, too
        again = () if sampling.json_schema is None else tuple(tokens)  # see `vllm_sampling`
        behind = () if again else tuple(tokens)
        params = VllmSampling(
            temperature=0.0,
            max_tokens=sampling.max_tokens - len(behind),
            stop_token_ids=sorted(sampling.stop_token_ids),
            ignore_eos=True,  # the ids that end an answer are among the others
            detokenize=False,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.logprobs if sampling.prompt_logprobs and not tokens else None,
            structured_outputs=None
            if sampling.json_schema is None
            else StructuredOutputsParams(json=sampling.json_schema),
            output_kind=RequestOutputKind.DELTA,
            extra_args=chosen_by_us(sampling, len(request.prompt), again),
        )
        id = f"{request.id}/{attempt}"
        try:
            queue = await self._engine.add_request(
                id, TokensPrompt(prompt_token_ids=[*request.prompt, *behind]), params
            )
        except REFUSED as error:
            raise InvalidArgument(f"request {request.id!r}: {error}; nothing was queued", id=request.id) from error
        return _Answer(self._engine, id, queue, request, len(again))

    def close(self) -> None:
        """See `SelfSchedulingEngine`."""
        if self._look is not None:
            self._look.cancel()
        self._engine.shutdown()

    async def _look_at_offers(self) -> None:
        try:
            with suppress(Exception):  # an engine that has ended is told by `failure`
                (quotes,) = await self._engine.collective_rpc("remap_offers")
                self._offers = tuple(Offer(nbytes, added_s) for nbytes, added_s in quotes)
        finally:
            self._look = None


def _weights_of(model: str) -> str:
    """A digest of values that lie all over the folder's files of weights; of a hub's model its name."""
    digest = hashlib.sha256()
    files = sorted(Path(model).glob("*.safetensors"))
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as stream:
            for place in range(SAMPLES):
                stream.seek(size * place // SAMPLES)
                digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest() if files else model
