# SPDX-License-Identifier: Apache-2.0
"""The time of computing on a machine: a roofline with soft knees, layer by layer. Pure, no numpy; cheap per iteration.

An operator that moves b bytes and computes f FLOP takes

    t(b, f) = ((b / (eff_bw * B))^p + (f / (eff_flops * F))^p)^(1/p) + op_overhead_s

with B and F the machine's nominal memory bandwidth and FLOP/s. Over Vidur's public measurements of single operators on
H100 and A100 its layer times are off by 3-7 % on average; the hard maximum of the two terms by up to 50 % at the knee.
One layer over T = prefill_tokens + decode_rows tokens takes the sum of

    linear operators   t(e (k n + T (k + n)), 2 T k n) each: weights, inputs and outputs, of e bytes an element
    other operators    other_ops_s + other_ops_s_per_token_per_khidden * T * hidden / 1000
    decode attention   attn_decode_overhead_s + KV bytes read / (attn_decode_eff * B)
    prefill attention  op_overhead_s + 4 * heads * head_dim * pairs / (attn_prefill_eff * F)

the last two only where such rows are present. Of a mixture of experts, T tokens read the weights of as many experts as they
touch on average (`touched`). Latent attention is counted as one KV head of half the latent's size: for DeepSeek-V3 that is
its KV cache exactly, and 1.8 times its prefill attention.
"""

from __future__ import annotations

from remap.errors import InvalidArgument
from remap.policy.hardware import Machine, Model

__all__ = ["Roofline", "prefill_pairs", "touched"]

_KEPT = 1 << 16  # answers that are remembered
_POPULAR, _SELECTIONS = 0.5, 0.9


def touched(experts: int, active: int, tokens: int) -> float:
    """Distinct experts, in the mean, of which `tokens` tokens select `active` each: from `active` to min(experts, tokens *
    active); 0.0 of no tokens.

    Half of the experts get 90 % of the selections, each of them as many as another, and tokens select independently. Measured
    for Qwen3-30B-A3B on mixed prompts: 65 of its 128 experts get 90 % (58 on code alone;
    https://mcp-tool-shop-org.github.io/gpu-container/handbook/derisk/). Other models are less skewed (half of OLMoE's get 75 %,
    https://github.com/JustVugg/colibri/issues/864) or more, and one model's figure is taken for all.
    """
    popular = _POPULAR * experts
    often = min(1.0, _SELECTIONS * active / popular)
    seldom = (active - popular * often) / (experts - popular)
    return float(popular * (1.0 - (1.0 - often) ** tokens) + (experts - popular) * (1.0 - (1.0 - seldom) ** tokens))


def prefill_pairs(new: int, before: int = 0) -> int:
    """Query-key pairs of one chunk: `new` tokens, each attending to `before` earlier ones, to those ahead of it, and to
    itself."""
    return new * before + new * (new + 1) // 2


class Roofline:
    """Times of one model on one machine, or on a share of it. Not thread-safe (it caches)."""

    __slots__ = (
        *("machine", "model", "share", "_linear", "_ends", "_bandwidth", "_compute", "_overhead", "_inverse", "_power"),
        *("_context_s", "_decode_s", "_pair_s"),
    )

    def __init__(self, machine: Machine, model: Model, share: float = 1.0) -> None:
        """share: of the machine's FLOP/s and memory bandwidth, above 0 and at most 1. Raises InvalidArgument (field)."""
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise InvalidArgument(
                f"share must be above 0 and at most 1, got {share!r}; nothing was made; correct share",
                field="share",
                value=share,
            )
        self.machine, self.model, self.share = machine, model, float(share)
        c = machine.roofline
        memory, flops = machine.hbm_bytes_per_s * self.share, machine.flops * self.share
        self._bandwidth, self._compute = c.eff_bw * memory, c.eff_flops * flops
        self._overhead, self._power, self._inverse = c.op_overhead_s, c.p, 1.0 / c.p
        self._decode_s = c.attn_decode_overhead_s
        self._context_s = model.kv_bytes_per_token_layer / (c.attn_decode_eff * memory)
        self._pair_s = 4.0 * model.heads * model.head_dim / (c.attn_prefill_eff * flops)
        self._linear: dict[int, float] = {}
        self._ends: dict[tuple[int, int], float] = {}

    def layer_s(self, prefill_tokens: int, prefill_pairs: int, decode_rows: int, decode_context: int) -> float:
        """Seconds of one layer over one batch; 0.0 for an empty one.

        prefill_tokens: new tokens of all prefill chunks; prefill_pairs: their query-key pairs (`prefill_pairs`).
        decode_rows: requests that decode one token; decode_context: KV tokens that all of them read. Not checked.
        """
        tokens = prefill_tokens + decode_rows
        seconds = self._linear.get(tokens)
        if seconds is None:
            if len(self._linear) >= _KEPT:
                self._linear.clear()
            seconds = self._linear[tokens] = self._tokens_s(tokens)
        if decode_rows:
            seconds += self._decode_s + decode_context * self._context_s
        if prefill_tokens:
            seconds += self._overhead + prefill_pairs * self._pair_s
        return seconds

    def ends_s(self, tokens: int, sampled_rows: int) -> float:
        """Seconds of the work outside of layers: embedding and final norm over `tokens`, head over `sampled_rows`."""
        key = (tokens, sampled_rows)
        seconds = self._ends.get(key)
        if seconds is None:
            if len(self._ends) >= _KEPT:
                self._ends.clear()
            seconds = self._ends[key] = self._ends_s(tokens, sampled_rows)
        return seconds

    def op_s(
        self, k: int, n: int, tokens: int, *, copies: int = 1, uses: int = 1, element: float | None = None
    ) -> float:
        """Seconds of one linear operator of k inputs and n outputs over `tokens`, of whose `copies` (experts) each token
        uses `uses`. element: bytes of an element of the matrix, by default as of the inputs."""
        rows, each = tokens * uses, self.model.dtype_bytes
        size = (each if element is None else element) * touched(copies, uses, tokens) * k * n + each * rows * (k + n)
        memory, compute = size / self._bandwidth, 2.0 * rows * k * n / self._compute
        return float((memory**self._power + compute**self._power) ** self._inverse) + self._overhead

    def pass_s(self, prefill_tokens: int, prefill_pairs: int, decode_rows: int, decode_context: int) -> float:
        """Seconds of all layers and of both ends; every decode row and no prefill token is sampled from."""
        layers = self.model.layers * self.layer_s(prefill_tokens, prefill_pairs, decode_rows, decode_context)
        return layers + self.ends_s(prefill_tokens + decode_rows, decode_rows)

    def _tokens_s(self, tokens: int) -> float:
        """All of a layer that depends on the number of tokens alone."""
        if tokens <= 0:
            return 0.0
        model, c = self.model, self.machine.roofline
        seconds = c.other_ops_s + c.other_ops_s_per_token_per_khidden * tokens * model.hidden / 1000.0
        for k, n, copies, uses, element in model.matrices:
            seconds += self.op_s(k, n, tokens, copies=copies, uses=uses, element=element)
        return seconds

    def _ends_s(self, tokens: int, sampled_rows: int) -> float:
        if tokens <= 0:
            return 0.0
        rows = 2.0 * tokens * self.model.hidden * self.model.dtype_bytes / self._bandwidth  # read once, written once
        seconds = 2.0 * (rows + self._overhead)  # the embedding's rows, then the norm's
        if sampled_rows > 0:
            seconds += self.op_s(*self.model.head, sampled_rows)
        return seconds
