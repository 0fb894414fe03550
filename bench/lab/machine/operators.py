"""Operators of a layer on a device, measured with torch: for `bench.lab machine`. Each result is compared with a slow one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from remap.errors import DriverError

from .copies import low

__all__ = ["Operators", "Sizes", "flops_of"]

Point = dict[str, float]


@dataclass(frozen=True)
class Sizes:
    """What is measured. cache_bytes: operands are cycled through so many bytes, so that none is in a cache when its turn
    comes. least_s: of each measurement, repeated for at least that long and three times."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]  # rows, context
    prefill: tuple[int, ...]
    other: tuple[int, ...]
    heads: int
    head_dim: int
    cache_bytes: int
    stream_bytes: int
    least_s: float


class Operators:
    """Measures on one device: "cpu" or "cuda:N". dtype: a name of torch's."""

    def __init__(self, device: str, dtype: str, sizes: Sizes) -> None:
        import torch

        self.torch: Any = torch
        self.device = device
        self.dtype = getattr(torch, dtype)
        self.sizes = sizes
        self.element = torch.empty((), dtype=self.dtype).element_size()
        torch.manual_seed(0)

    def _random(self, *shape: int) -> Any:
        return self.torch.randn(*shape, device=self.device, dtype=self.dtype)

    def _copies(self, nbytes: int) -> int:
        return max(1, min(64, math.ceil(self.sizes.cache_bytes / nbytes)))

    def _seconds(self, run: Callable[[int], Any]) -> float:
        """The lower quartile of the seconds of run(i), i counting up."""
        run(0)
        run(1)
        if self.device == "cpu":
            return self._host_seconds(run)
        return self._device_seconds(run)

    def _host_seconds(self, run: Callable[[int], Any]) -> float:
        found: list[float] = []
        spent = 0.0
        while spent < self.sizes.least_s or len(found) < 3:
            begun = time.perf_counter()
            run(len(found))
            found.append(time.perf_counter() - begun)
            spent += found[-1]
        return low(found)

    def _device_seconds(self, run: Callable[[int], Any]) -> float:
        """By events around runs of a captured graph, which starts kernels without the host: as engines do."""
        torch = self.torch
        inner = 16
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            run(0)
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for index in range(inner):
                run(index)
        found: list[float] = []
        spent = 0.0
        while spent < self.sizes.least_s or len(found) < 3:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                begin.record()
                graph.replay()
                end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1e3
            found.append(seconds / inner)
            spent += seconds
        return low(found)

    def _check(self, what: str, found: Any, expected: Any) -> None:
        tolerance = 3e-2 if self.element < 4 else 1e-3
        error = (found.double().cpu() - expected.double().cpu()).abs().max().item()
        scale = max(1.0, expected.abs().max().item())
        if not error <= tolerance * scale:
            raise DriverError(
                f"{what} on {self.device} is off by {error:.3g} of {scale:.3g}; nothing was written; do not use this device",
                call=what,
            )

    def stream_bytes_per_s(self) -> float:
        """Bytes read and written per second by copying one tensor into another."""
        source = self.torch.ones(self.sizes.stream_bytes, device=self.device, dtype=self.torch.uint8)
        target = self.torch.zeros_like(source)
        seconds = self._seconds(lambda _: target.copy_(source))
        self._check("a copy", target[:64], source[:64])
        return 2 * self.sizes.stream_bytes / seconds

    def linear(self) -> list[Point]:
        """x of tokens x k times the transpose of w, n x k, which is read from memory each time."""
        points: list[Point] = []
        for k, n in self.sizes.shapes:
            count = self._copies(k * n * self.element)
            weights = [self._random(n, k) / math.sqrt(k) for _ in range(count)]
            for tokens in self.sizes.tokens:
                x = self._random(tokens, k)
                run = self._linear(x, weights)
                y = run(1)
                some, few = min(4, tokens), min(16, n)
                expected = x[:some].double().cpu() @ weights[1 % count][:few].double().cpu().T
                self._check("a linear operator", y[:some, :few], expected)
                points.append({"k": k, "n": n, "tokens": tokens, "seconds": self._seconds(run)})
        return points

    def _linear(self, x: Any, weights: list[Any]) -> Callable[[int], Any]:
        linear = self.torch.nn.functional.linear
        return lambda index: linear(x, weights[index % len(weights)])

    def decode_attention(self) -> list[Point]:
        """One new token of each of `rows` requests over `context` cached ones; keys and values are read from memory."""
        heads, d = self.sizes.heads, self.sizes.head_dim
        points: list[Point] = []
        for rows, context in self.sizes.decode:
            count = self._copies(2 * rows * heads * context * d * self.element)
            caches = [
                (self._random(rows, heads, context, d), self._random(rows, heads, context, d)) for _ in range(count)
            ]
            q = self._random(rows, heads, 1, d)
            run = self._attention(q, caches, causal=False)
            self._check("decode attention", run(1)[0], self._slow_attention(q, *caches[1 % count]))
            points.append(
                {"rows": rows, "context": context, "kv_heads": heads, "head_dim": d, "seconds": self._seconds(run)}
            )
        return points

    def prefill_attention(self) -> list[Point]:
        """Causal attention of one request's prompt."""
        heads, d = self.sizes.heads, self.sizes.head_dim
        points: list[Point] = []
        for tokens in self.sizes.prefill:
            q, k, v = (self._random(1, heads, tokens, d) for _ in range(3))
            run = self._attention(q, [(k, v)], causal=True)
            expected = self._slow_attention(q[:, :, -1:], k, v)  # the last token attends to all
            self._check("prefill attention", run(0)[0, :, -1:], expected)
            points.append({"tokens": tokens, "heads": heads, "head_dim": d, "seconds": self._seconds(run)})
        return points

    def _attention(self, q: Any, caches: list[Any], *, causal: bool) -> Callable[[int], Any]:
        attention = self.torch.nn.functional.scaled_dot_product_attention
        return lambda index: attention(q, *caches[index % len(caches)], is_causal=causal)

    def _slow_attention(self, q: Any, k: Any, v: Any) -> Any:
        """Of the first request, in double precision."""
        q, k, v = (each[0].double().cpu() for each in (q, k, v))
        return self.torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), dim=-1) @ v

    def other_ops(self) -> list[Point]:
        """What else a layer does: two norms, a rotation of queries and keys, the gate of the feed-forward, one sum."""
        torch = self.torch
        hidden = self.sizes.heads * self.sizes.head_dim
        norm, silu = torch.nn.functional.rms_norm, torch.nn.functional.silu
        weight = self._random(hidden)
        points: list[Point] = []
        for tokens in self.sizes.other:
            x, y = self._random(tokens, hidden), self._random(tokens, hidden)
            gate, up = (self._random(tokens, 7 * hidden // 2) for _ in range(2))
            rotate = self._random(tokens, hidden // 2)

            def run(_: int, x: Any = x, y: Any = y, gate: Any = gate, up: Any = up, rotate: Any = rotate) -> Any:
                half = hidden // 2
                a = norm(x, (hidden,), weight)
                torch.cat((a[:, :half] * rotate - a[:, half:], a[:, half:] * rotate + a[:, :half]), dim=1)
                silu(gate) * up
                return norm(x + y, (hidden,), weight)

            total = (x + y).double().cpu()
            expected = total / (total.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double().cpu()
            self._check("a norm", run(0), expected)
            points.append({"tokens": tokens, "hidden": hidden, "seconds": self._seconds(run)})
        return points


def flops_of(points: Iterable[Point]) -> float:
    """The most FLOP/s of any linear operator."""
    return max(2 * p["tokens"] * p["k"] * p["n"] / p["seconds"] for p in points)
