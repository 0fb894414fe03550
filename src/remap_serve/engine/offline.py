# SPDX-License-Identifier: Apache-2.0
"""Offline jobs: serve every request of a file, and write the answers to another, across as many runs as it takes."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import TYPE_CHECKING, Any, Protocol

from remap.errors import Error, InvalidArgument, InvalidState, OutOfBlocks
from remap_serve.engine.offline_file import AnswerFile, Job
from remap_serve.engine.request import Request

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    from remap_serve.engine.engine import Engine
    from remap_serve.engine.request import Output

__all__ = ["OfflineProgress", "Tokenizer", "generate_offline"]

# The engine's metrics keep every token's time. A job of a million requests would fill the memory with them.
MOST_STEPS_MEASURED = 4096


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


@dataclass(frozen=True)
class OfflineProgress:
    """Lines of the requests: all, those with an answer, those whose answer is an error, those that an earlier run answered;
    and the tokens that this run generated for its answers.
    """

    total: int
    answered: int
    errors: int
    resumed: int
    tokens: int


def generate_offline(
    engine: Engine,
    requests_path: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer | None = None,
    on_progress: Callable[[OfflineProgress], None] | None = None,
) -> OfflineProgress:
    """Serve the requests of a JSON Lines file that have no answer yet in the output file; see docs/offline.md for both.

    A line that cannot be served gets an error as its answer; the others are served. Whatever ends the run (an exception, an
    interrupt, SIGKILL, a full disk), the same call goes on where it ended. tokenizer: for prompts that are text, and the
    text of answers; its end-of-text token stops requests without `stop_token_ids`. on_progress: called once a step, first
    when both files are read. The engine's metrics start anew, every few thousand steps again; afterwards the engine has no
    requests.

    Raises InvalidState if the engine has unfinished requests, or another run writes to the output file; InvalidArgument (field
    `field`) if a file cannot be used, or the output file has answers to other requests (nothing changed in both cases);
    AnswersNotWritten if the disk is full or fails. Errors of `engine.step` pass through, but for OutOfBlocks of one
    request, which is its answer.
    """
    if engine.unfinished:
        raise InvalidState(
            f"the engine has {engine.unfinished} unfinished requests, whose outputs would be lost; nothing was served; run or "
            "abort them first",
            unfinished=engine.unfinished,
        )
    stop = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    live: dict[str, Job] = {}
    tokens = 0
    with AnswerFile(requests_path, output_path) as answers:

        def progress() -> OfflineProgress:
            found = OfflineProgress(answers.total, answers.answered, answers.errors, answers.resumed, tokens)
            if on_progress is not None:
                on_progress(found)
            return found

        progress()
        engine.reset_metrics()
        jobs = answers.jobs(stop)
        try:
            while True:
                # Twice as many as can run, so that a request that finishes is replaced in the same step.
                new = list(islice(jobs, 2 * engine.scheduler.max_num_seqs - len(live)))
                for job in new:
                    try:
                        request = _request(job, tokenizer)
                    except InvalidArgument as error:
                        answers.write(job, error=_told(error))
                        continue
                    live[request.id] = job
                    try:
                        engine.add_request(request)
                    except InvalidArgument as error:
                        answers.write(live.pop(request.id), error=_told(error))
                if not new and not live:
                    return progress()
                try:
                    finished = engine.step().finished if live else ()
                except OutOfBlocks as error:
                    stuck = error.fields.get("request")
                    if stuck not in live:
                        raise
                    # It would be stuck in every later run, too, and no request behind it would ever be served.
                    engine.abort(str(stuck))
                    answers.write(live.pop(str(stuck)), error=_told(error))
                    continue
                for output in finished:
                    answers.write(live.pop(output.id), **_answer(output, tokenizer))
                    tokens += len(output.tokens)
                if len(engine.metrics.timeline) >= MOST_STEPS_MEASURED:
                    engine.reset_metrics()
                progress()
        finally:
            for id in live:
                with suppress(InvalidArgument):  # it finished in the step that was interrupted
                    engine.abort(id)


def _request(job: Job, tokenizer: Tokenizer | None) -> Request:
    """Raises InvalidArgument if the line cannot be served."""
    if job.error is not None:
        raise job.error
    assert job.custom_id is not None and job.sampling is not None
    prompt = job.prompt
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidArgument("the prompt is a text, and there is no tokenizer; give token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"the prompt is not valid Unicode ({error})") from error
        with _foreign("the tokenizer refuses the prompt"):
            prompt = tuple(map(index, tokenizer.encode(prompt)))
    return Request(job.custom_id, prompt, job.sampling)


def _answer(output: Output, tokenizer: Tokenizer | None) -> dict[str, Any]:
    tokens = list(output.tokens)
    text = {}
    if tokenizer is not None:
        try:
            with _foreign("the tokenizer cannot decode the answer"):
                text["text"] = str(tokenizer.decode(tokens, skip_special_tokens=True))
        except InvalidArgument as error:
            return {"error": _told(error)}
    return {"tokens": tokens, **text, "finish_reason": output.finish_reason}


@contextmanager
def _foreign(what: str) -> Iterator[None]:
    """Code of the tokenizer's, for one line. Raises InvalidArgument for whatever it raises: that would end every later run at the
    same line as well, and no request behind it would ever be served."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a tokenizer may raise anything; a panic of one in Rust is no Exception
        raise InvalidArgument(f"{what} ({type(error).__name__}: {str(error)[:200]})") from error


def _told(error: Error) -> dict[str, str]:
    return {"type": type(error).__name__, "message": str(error)}
