# SPDX-License-Identifier: Apache-2.0
"""`remap offline`: answers a file of requests with a model, in as many runs as it takes
(`remap_serve.engine.generate_offline`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from remap.cli.errors import FAILED, exit_on_error, needed
from remap.cli.options import MEMORY, Json, MaxBatchTokens, MaxNumSeqs, memory_bytes, print_json
from remap.errors import InvalidArgument
from remap.sizes import parse_size

if TYPE_CHECKING:
    from remap_serve.engine import OfflineProgress
    from remap_serve.engine.engine import Engine

__all__ = ["offline"]

# Without --memory there is KV cache for this many tokens.
KV_TOKENS = 8192
PAGE_BYTES = 2 << 20


def offline(
    requests: Annotated[Path, typer.Argument(help="JSON Lines: a request a line, with custom_id and prompt.")],
    answers: Annotated[
        Path, typer.Argument(help="JSON Lines, a line an answer. If it exists, the run goes on after it.")
    ],
    model: Annotated[str, typer.Option(help="Folder, or hub name, of a transformers model: Llama, Qwen, OPT, GPT-2.")],
    memory: Annotated[
        str | None,
        typer.Option(
            help=f"{MEMORY} It may be less than the weights have: then layers stream.",
            show_default=f"weights, and KV of {KV_TOKENS} tokens",
        ),
    ] = None,
    host_kv: Annotated[
        str | None,
        typer.Option(
            help="Beside it, memory for KV that streams in each pass.", show_default="if layers stream: as --memory"
        ),
    ] = None,
    ratio: Annotated[
        str,
        typer.Option(
            help="Of KV that streams, how much is kept as activations: ACTIVATIONS:KV, such as 1:1; or auto, by measured times."
        ),
    ] = "auto",
    max_num_seqs: MaxNumSeqs = 32,
    max_batch_tokens: MaxBatchTokens = 512,
    as_json: Json = False,
) -> None:
    """Answer every request of a file. Interrupt it as you like: the same command goes on where it ended."""
    console = Console(soft_wrap=True, stderr=as_json)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.completed:>6.0f}/{task.total:.0f}"),
        BarColumn(bar_width=30),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    seen: list[OfflineProgress] = []
    with exit_on_error():
        from remap_serve.engine.offline import generate_offline
        from remap_serve.engine.offline_file import AnswerFile

        needed("torch", "transformers", "`remap offline`")
        needed("transformers", "transformers", "`remap offline`")
        with AnswerFile(requests, answers):
            pass  # files that cannot be used are refused before a model is loaded
        try:
            with _serving(model, memory, host_kv, ratio, max_num_seqs, max_batch_tokens) as (engine, tokenizer):
                began = time.perf_counter()
                with Progress(*columns, console=console) as bars:
                    task = bars.add_task("requests", total=0, state="")

                    def show(now: OfflineProgress) -> None:
                        seen[:] = [now]
                        speed = now.tokens / (time.perf_counter() - began)
                        state = f"{speed:.0f} tokens/s, {now.errors} errors"
                        bars.update(task, completed=now.answered, total=now.total, state=state)

                    done = generate_offline(engine, requests, answers, tokenizer=tokenizer, on_progress=show)
                chosen = _chosen(engine)
        except KeyboardInterrupt:
            how = f"{seen[0].answered} of {seen[0].total} requests are answered" if seen else "nothing was served"
            text = f"interrupted: {how}; the same command goes on from there"
            Console(stderr=True, soft_wrap=True).print(text, style="yellow", markup=False, highlight=False)
            raise typer.Exit(FAILED) from None
    if as_json:
        print_json({**asdict(done), "chosen": chosen})
        raise typer.Exit(FAILED if done.errors else 0)
    text = f"{done.answered} of {done.total} requests are answered in {answers}, {done.errors} of them with an error"
    for line in (text, chosen):
        if line:
            console.print(line, markup=False, highlight=False)
    raise typer.Exit(FAILED if done.errors else 0)


def _chosen(engine: Engine) -> str:
    """The blocks that a throughput engine kept as activations, and why; "" if nothing was served, or by another engine."""
    from remap_serve.engine import ThroughputEngine

    chosen = engine.chosen if isinstance(engine, ThroughputEngine) else None
    return "" if chosen is None else "activations to KV {}:{}, {}".format(*chosen.ratio, chosen.why)


@contextmanager
def _serving(
    name: str, memory: str | None, host_kv: str | None, ratio: str, max_num_seqs: int, max_batch_tokens: int
) -> Iterator[tuple[Engine, Any]]:
    """The engine, on a session with the model, and the model's tokenizer, or None if it has none.

    Raises InvalidArgument if the model cannot be loaded, is of no known family, or does not fit.
    """
    import transformers

    import remap
    from remap.model.footprint import footprint
    from remap_serve.engine import LLMEngine, ThroughputEngine
    from remap_serve.engine.models import decoder_of, require_block_activations
    from remap_serve.engine.scheduler import TILE
    from remap_serve.engine.throughput_layout import lay_out

    budget = None if memory is None else memory_bytes(memory)
    host = None if host_kv is None else parse_size(host_kv, "host_kv")
    mixture = None if ratio == "auto" else _ratio(ratio)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"model: {name} cannot be loaded: {error}", field="model", value=name) from error
    decoder = decoder_of(model)
    spec = partial(
        remap.KVSpec,
        layers=len(decoder.layers),
        kv_heads=decoder.kv_heads,
        head_dim=decoder.head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
    )
    probe, size = spec(min_blocks=0, max_blocks=1), footprint(model, None)
    weights = size.pages(PAGE_BYTES) * PAGE_BYTES
    if budget is None:
        budget = weights + -(-KV_TOKENS // probe.block_tokens) * probe.block_bytes
        budget = -(-budget // PAGE_BYTES) * PAGE_BYTES
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError):
        tokenizer = None  # prompts have to be token ids
    if host is not None or (mixture or (0, 1))[0] or budget < weights + probe.block_bytes:
        page = size.page_size(ranges=2 * probe.layers)
        lay = partial(
            lay_out,
            budget,
            page,
            size,
            spec,
            host_bytes=budget if host is None else host,
            longest_tokens=decoder.max_tokens,
            num_seqs=max_num_seqs,
            batch_tokens=max_batch_tokens,
            chunk_align=TILE,
        )
        try:
            if mixture is None:
                require_block_activations(decoder)
            layout = lay(ratio=mixture)
        except InvalidArgument:
            if mixture is not None:
                raise
            layout = lay(ratio=(0, 1))  # the engine says why
        # Nothing is served in time here: passes wait for copies as long as they take.
        config = remap.advanced.Knobs(slowdown=1e6)
        with remap.Session(capacity=budget, device="cpu", page_bytes=page, config=config) as session:
            tenant = session.attach(model, kv=layout.spec, hooks=False, resident_layers=layout.resident_layers)
            seqs, tokens = layout.num_seqs, max_batch_tokens
            yield ThroughputEngine(model, tenant, ratio=mixture, max_num_seqs=seqs, max_batch_tokens=tokens), tokenizer
        return
    # All that the weights leave is KV from the start; the region has addresses for the whole budget.
    start, most = (budget - weights) // probe.block_bytes, max(1, budget // probe.block_bytes)
    with remap.Session(capacity=budget, device="cpu", page_bytes=PAGE_BYTES) as session:
        tenant = session.attach(model, kv=spec(min_blocks=start, max_blocks=most), hooks=False)
        yield (
            LLMEngine(model, tenant, session=session, max_num_seqs=max_num_seqs, max_batch_tokens=max_batch_tokens),
            tokenizer,
        )


def _ratio(text: str) -> tuple[int, int]:
    """Raises InvalidArgument (field ratio)."""
    parts = text.split(":")
    if len(parts) == 2 and all(part.isdecimal() for part in parts) and any(map(int, parts)):
        return int(parts[0]), int(parts[1])
    raise InvalidArgument(
        f"ratio must be auto, or two whole numbers, ACTIVATIONS:KV, such as 1:1, got {text!r}; nothing was served",
        field="ratio",
        value=text,
    )
