"""The suite for engines' authors: engines that do as they should conform, and each of the usual mistakes is found."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from arena_worlds import External

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import remap  # noqa: E402
from remap import conformance  # noqa: E402

SOURCE = (Path(__file__).resolve().parents[2] / "examples/02_own_engine.py").read_text(encoding="utf-8")
ENGINE, MAIN = SOURCE.split("torch.manual_seed(0)")
SESSION: dict[str, Any] = {"capacity": "11MiB", "page_bytes": "64KiB"}
KV = remap.KVSpec(layers=8, kv_heads=2, head_dim=32, dtype="float32", block_tokens=16, min_blocks=6, max_blocks=128)
ANSWERED = 6


def engine(*changes: tuple[str, str]) -> dict[str, Any]:
    """The example's functions, with these changes to its source."""
    text = ENGINE
    for before, after in changes:
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    found: dict[str, Any] = {"__name__": __name__}  # where dataclasses look names up
    exec(compile(text, "02_own_engine.py", "exec"), found)
    return found


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=8, vocab_size=100, eos_token_id=None, **shape)).eval()


def served(model: Any, functions: dict[str, Any]) -> conformance.Serve:
    def serve(session: remap.Session) -> object:
        tenant = session.attach(model, name="llama", kv=KV, hooks=False)
        sequences = [functions["Sequence"](list(range(1, 20 + 9 * n)), 32 + 12 * n) for n in range(ANSWERED)]
        functions["serve"](session, model, tenant, list(sequences))
        return [each.tokens for each in sequences]

    return serve


def test_the_example_engine_conforms(model: Any) -> None:
    outcomes = list(conformance.check(served(model, engine()), **SESSION))
    assert [each.problems for each in outcomes] == [[]] * 9
    assert all(each.copies and each.grown for each in outcomes[1:])
    assert any(each.shrunk for each in outcomes) and any(each.moved for each in outcomes)
    assert len({(each.case, each.seed) for each in outcomes}) == 9


def found(model: Any, *changes: tuple[str, str]) -> str:
    return " ".join(map(str, conformance.check(served(model, engine(*changes)), seeds=(0,), **SESSION)))


def test_tables_that_do_not_follow_moved_blocks_are_found(model: Any) -> None:
    told = found(model, ("each.blocks = [moved.get(block, block) for block in each.blocks]", "pass"))
    assert "have not been freed" in told  # `free` knows none of the old ids
    assert "not run: " in told  # in strict mode it would end this process


def test_blocks_move_also_where_the_lowest_would_be_in_no_layers_way(model: Any) -> None:
    """An engine that ignores report.moved was called conforming: the pool hands out its lowest blocks, and none of them moved."""
    ignores = engine(("each.blocks = [moved.get(block, block) for block in each.blocks]", "pass"))
    cases = conformance.CASES[0], conformance.CASES[3]
    _, outcome = conformance.check(
        served(model, ignores), seeds=(1,), cases=cases, **{**SESSION, "capacity": "11008KiB"}
    )
    assert outcome.moved and "have not been freed" in str(outcome)


def test_where_no_block_moves_the_suite_says_that_it_knows_nothing(model: Any) -> None:
    away = served(model, engine())
    *before, last = conformance.check(away, cases=conformance.CASES[:2], **SESSION)
    assert not before[0].problems and not last.moved
    assert [each.partition(":")[0] for each in last.problems] == ["inconclusive"]


def test_an_engine_with_its_own_allocator_may_leave_by_itself() -> None:
    """Nothing moves there, which was asked of those alone that were still attached: vLLM detaches, and was inconclusive."""

    def serve(session: remap.Session) -> object:
        kv = replace(KV, layers=4, min_blocks=2, max_blocks=60)
        tenant = session.attach_bytes([bytes([n]) * (256 << 10) for n in range(4)], name="own", kv=kv)
        allocator = External(tenant)
        for _ in range(6):
            session.step({"own": remap.Demand(blocks=20)})
            with tenant.forward(tokens=1, phase="decode"):
                for layer in range(4):
                    tenant.wait(layer)
                    tenant.done(layer)
        assert not allocator.used
        session.detach("own")
        return []

    session = {"capacity": "2MiB", "page_bytes": "64KiB"}
    outcomes = list(conformance.check(serve, cases=conformance.CASES[:2], **session))
    assert [each.problems for each in outcomes] == [[], []]
    assert outcomes[1].external and outcomes[1].copies and not outcomes[1].moved


MISTAKES = {
    "a layer is not waited for": (
        "tenant.wait(i)  # 5", "i == 3 or tenant.wait(i)  # 5", r"InvalidState.*wait and done for every layer",
    ),
    "blocks are never freed": (
        "            tenant.kv.free(each.blocks)\n            running.remove(each)", "            running.remove(each)",
        "were not freed|OutOfBlocks",
    ),
    "blocks that are not its own are written": (
        "keys[block, offset], values[block, offset] =",
        "keys[tenant.kv.max_blocks - 1 - block, offset], values[block, offset] =", "written|differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_engines_mistakes_are_found(model: Any, mistake: str) -> None:
    before, after, told = MISTAKES[mistake]
    assert re.search(told, found(model, (before, after)), re.DOTALL)


def test_an_engine_that_never_steps_is_found(model: Any) -> None:
    def serve(session: remap.Session) -> object:
        session.attach(model, name="llama", kv=KV, hooks=False)
        return None

    told = [each.problems for each in conformance.check(serve, cases=conformance.CASES[:2], **SESSION)]
    assert told[0] == ["the engine never called session.step"]
    assert "no layer streamed" in told[1][1]


def test_an_engine_that_closes_the_session_and_what_it_raises_in_a_pass_are_told(model: Any) -> None:
    def raises(session: remap.Session) -> object:
        session.attach(model, name="llama", kv=KV, hooks=False).forward().__enter__()
        raise AssertionError("its own")

    for serve, told in (
        (remap.Session.close, "the engine has closed the session that it was given"),
        (raises, "AssertionError: its own"),
    ):
        (outcome,) = conformance.check(serve, cases=conformance.CASES[:1], **SESSION)
        assert outcome.problems == [told]


def test_the_reference_engine_conforms(model: Any) -> None:
    from remap_serve.engine import LLMEngine, Request, SamplingParams

    def serve(session: remap.Session) -> object:
        tenant = session.attach(model, name="llama", kv=replace(KV, min_blocks=8), hooks=False)
        engine = LLMEngine(model, tenant, session=session, max_num_seqs=8, max_batch_tokens=64, max_model_len=256)
        for n in range(ANSWERED):
            engine.add_request(Request(str(n), tuple(range(1, 20 + 9 * n)), SamplingParams(max_tokens=12 + 3 * n)))
        answers: dict[str, tuple[int, ...]] = {}
        while engine.unfinished:
            for each in engine.step().finished:
                answers[each.id] = tuple(each.tokens)
        return answers

    outcomes = list(conformance.check(serve, seeds=(0,), **SESSION))
    assert [each.problems for each in outcomes] == [[]] * 5
    assert all(each.copies for each in outcomes[1:])


def test_the_transformers_adapter_conforms(model: Any) -> None:
    from remap.adapters.transformers import attach

    prompts = torch.tensor([list(range(n, n + 24)) for n in range(3)])

    def serve(session: remap.Session) -> object:
        with attach(model, session=session, name="llama", block_tokens=16, min_tokens=96, max_tokens=2048):
            return [model.generate(prompts[:n], max_new_tokens=40, do_sample=False).tolist() for n in (1, 3, 2)]

    outcomes = list(conformance.check(serve, seeds=(0,), **SESSION))
    assert [each.problems for each in outcomes] == [[]] * 5
    assert all(each.copies for each in outcomes[1:])
