"""`remap plan`: capacities and limits against published and independently computed ones, and what the command prints."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from reference.sliced_passes import slices_period
from remap.adapters.settings import Settings
from remap.errors import InvalidArgument
from remap.policy import schedule
from remap.policy.hardware import machine, model
from remap_serve.cli.plan import plan as command
from remap_serve.sim.hf_config import find_model
from remap_serve.sim.model_variants import in_dtype, sharded
from remap_serve.sim.planning import balance, kv_tokens, limit, memory_of, plan
from remap_serve.sim.roofline import Roofline, prefill_pairs

GH200 = machine("GH200")

# An independent calculation for the memory shares of Oneiros, on 97871 MiB less 0.5 GB: KV tokens without remapping (rounded),
# tokens per layer, context, requests before, the self-consistent limit by Eq. 5, requests with it.
SHARES = [
    ("OPT-13b", "35%", 11_855, 768, 512, 23, 6, 32),
    ("OPT-13b", "35%", 11_855, 768, 2048, 5, 6, 8),
    ("Llama-2-13b", "35%", 11_459, 774, 512, 22, 6, 31),
    ("Llama-2-13b", "35%", 11_459, 774, 2048, 5, 6, 7),
    ("Llama-3-8b", "20%", 30_247, 3328, 512, 59, 6, 98),
    ("Llama-3-8b", "20%", 30_247, 3328, 2048, 14, 5, 22),
    ("OPT-30b", "65%", 4_547, 896, 512, 8, 5, 17),
    ("OPT-30b", "65%", 4_547, 896, 2048, 2, 5, 4),
    ("OPT-6.7b", "15%", 3_008, 768, 512, 5, 4, 11),
    ("OPT-6.7b", "15%", 3_008, 768, 2048, 1, 3, 2),
]
# Where the exact answer is another one than Eq. 5's, and which. Eq. 5 assumes rotating slots, and copies that fit on average
# (alpha + 2) T_T <= n T_c. Our slots are fixed: with two of them and seven streamed layers, the last and the first share one,
# so that the first layer's copy waits for the last one's computation, and the gap around the end of the pass must hold a copy.
EXACT = {("Llama-3-8b", 2048): 4}
# Layers of an idle model that a prefill of 512 and of 2048 tokens hides by N T_T <= n T_p, at most n - 1.
HIDDEN = [
    *(("OPT-13b", "GH200", 17, 39), ("OPT-13b", "H100-SXM", 2, 8), ("OPT-13b", "H100-PCIe", 3, 10)),
    *(("OPT-13b", "H200", 2, 7), ("Llama-2-13b", "GH200", 17, 39), ("Llama-3-8b", "GH200", 14, 31)),
    *(("Llama-3-8b", "H100-SXM", 1, 6), ("Llama-3-8b", "H100-PCIe", 2, 8), ("Llama-3-8b", "H200", 1, 6)),
    *(("OPT-30b", "GH200", 19, 47), ("OPT-30b", "H100-SXM", 2, 9), ("OPT-30b", "H200", 2, 8)),
    *(("OPT-6.7b", "GH200", 14, 31), ("OPT-6.7b", "H100-SXM", 2, 6), ("OPT-6.7b", "H200", 1, 6)),
]


def refused(field: str, call: Any, *arguments: Any, **named: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        call(*arguments, **named)
    assert caught.value.field == field, str(caught.value)
    return caught.value


def rows_of(name: str, tokens: int, alpha: float, context: int) -> int:
    found = model(name)
    return int((tokens + alpha * found.layer_bytes / found.kv_bytes_per_token) // context)


@pytest.mark.parametrize(("name", "share", "tokens", "per_layer", "context", "before", "paper", "after"), SHARES)
def test_capacities_and_limits_of_the_papers_shares(
    name: str, share: str, tokens: int, per_layer: int, context: int, before: int, paper: int, after: int
) -> None:
    found = model(name)
    memory = memory_of(share, GH200)
    assert round((memory - found.weight_bytes - 500e6) / found.kv_bytes_per_token) == tokens
    kv = kv_tokens(found, memory)
    assert tokens - 1 <= kv <= tokens, "whole tokens: rounded down"
    assert found.layer_bytes // found.kv_bytes_per_token == per_layer
    roof = Roofline(GH200, found)

    def eq5_holds(alpha: int) -> bool:
        rows = rows_of(name, kv, alpha, context)
        copy_s = found.layer_bytes / GH200.h2d_bytes_per_s
        return (alpha + 2) * copy_s <= found.layers * roof.layer_s(0, 0, rows, rows * context)

    assert max(alpha for alpha in range(found.layers - 1) if alpha == 0 or eq5_holds(alpha)) == paper
    assert rows_of(name, kv, paper, context) == after

    ours = balance(roof, kv, context)
    assert ours.rows_before == before
    assert ours.remapped == EXACT.get((name, context), paper)
    assert ours.rows == rows_of(name, kv, ours.remapped, context)
    assert ours.slices > paper, "slices copy only what they free, and two slots of them"
    assert ours.speedup > 1.1 or ours.rows == before
    # Behind the link of an H100 SXM nothing is hidden, by Eq. 5 nor by ours; slices free a layer or so.
    slow = balance(Roofline(GH200.with_(h2d_bytes_per_s=machine("H100-SXM").h2d_bytes_per_s), found), kv, context)
    assert (slow.remapped, slow.rows) == (0, before) and 0 < slow.slices < 2


@pytest.mark.parametrize(("name", "on", "short", "long"), HIDDEN)
def test_layers_hidden_by_a_prefill(name: str, on: str, short: int, long: int) -> None:
    """Eq. 5's counterpart for a model that wakes, and ours. Ours is never more, and less by the ring: the layer whose memory is
    the ring is loaded too, and the first layer that is away cannot hide behind itself, nor behind those after it."""
    where, what = machine(on), model(name)
    roof, n = Roofline(where, what), what.layers
    copy_s = what.layer_bytes / where.h2d_bytes_per_s
    reload = plan(where, what, memory_bytes=where.hbm_bytes, context=512).reload
    assert [tokens for tokens, _ in reload.hidden] == [512, 2048]
    for (tokens, hidden), papers in zip(reload.hidden, (short, long), strict=True):
        layer_s = roof.layer_s(tokens, prefill_pairs(tokens), 0, 0)
        assert min(n - 1, int(n * layer_s / copy_s)) == papers
        assert papers - 2 <= hidden <= papers
        late = [
            schedule.one_shot_delay([layer_s] * n, where.copy_s(what.layer_bytes), range(n - away - 1, n))
            for away in range(n - 1)
        ]
        assert hidden == max([away for away in range(n - 1) if late[away] == 0], default=0)
    for (tokens, late), (_, hidden) in zip(reload.late_s, reload.hidden, strict=True):
        layer_s = roof.layer_s(tokens, prefill_pairs(tokens), 0, 0)
        exact = max(0.0, (n // 2 + 1) * where.copy_s(what.layer_bytes) - (n - 1) * layer_s)
        assert late == pytest.approx(exact, abs=1e-9)
        assert (late == 0) == (hidden >= n // 2)


def any_share(layer_s: float, copy_s: float, n: int) -> float:
    """The most layers' worth that slices of n equal layers free through two slots without a stall, if any share is possible."""
    low, high = 0.0, 1.0
    for _ in range(60):
        share = (low + high) / 2
        period = slices_period([layer_s] * n, [copy_s] * n, [share] * n, 2, range(n))
        low, high = (share, high) if period <= n * layer_s * (1 + 1e-9) else (low, share)
    return low * (n - 2)


def test_limits_agree_with_the_schedule() -> None:
    roof = Roofline(GH200, model("Llama-3-8b"))
    n = roof.model.layers
    for rows in (1, 16, 128):
        found = limit(roof, rows, 512, kv_tokens=30_000)
        uniform = schedule.max_remapped(found.layer_s, found.copy_s, layers=n)
        nested = schedule.max_remapped(
            found.layer_s, found.copy_s, layers=n, select=lambda n, a, b: schedule.nested(n)[: a + b]
        )
        by_kind = {"uniform": uniform, "nested": nested}
        assert (found.remapped, found.buffers) == by_kind[found.selection] == max(uniform, nested)
        assert found.fits == (rows * 512 <= 30_000 + max(found.remapped, found.slices) * 3328.125)
        assert abs(found.paper - found.remapped) <= 2
        continuous = any_share(found.layer_s, found.copy_s, n)
        assert found.slices == pytest.approx(continuous, abs=0.4), "whole pages, and a set-up time that does not shrink"
    assert limit(roof, 1 << 20, 512).fits


@pytest.mark.parametrize(
    ("on", "what", "memory", "selection_set"),
    [
        *(("GH200", "OPT-13b", "35%", "slices"), ("GH200", "Llama-3-8b", "20%", "slices")),
        *(("H100", "OPT-13b", "40%", None), ("H200", "llama-3-8b", "16%", None), ("A100", "OPT-13b", "40%", None)),
        # More requests than run at once have room already, on any link.
        *(
            ("4090", "Llama-2-7b", None, None),
            ("H200", "llama-3-8b", "90%", None),
            ("GH200", "llama-3-8b", "90%", None),
        ),
    ],
)
def test_the_advice(on: str, what: str, memory: str | None, selection_set: str | None) -> None:
    # As large a machine as donors beside it need: what is asked here is the advice.
    donors = [model("OPT-6.7b"), model("OPT-13b")]
    where, active = machine(on), selection_set is not None
    bytes_of = memory_of(memory, where)
    where = where.with_(hbm_bytes=where.hbm_bytes + sum(donor.weight_bytes for donor in donors))
    found = plan(where, model(what), memory_bytes=bytes_of, donors=donors)
    assert found.advice.active is active and found.advice.donors
    assert all(setting.reason for setting in found.advice.settings)
    values = {setting.name: setting.value for setting in found.advice.settings}
    assert values.get("selection") == selection_set
    assert values["slowdown"] == (0.02 if active else 0.0)
    assert values["min_idle"] == (1.0 if on == "GH200" else 4.0) and values["policy"] == "expected_next_use"
    share = where.h2d_bytes_per_s / (where.hbm_bytes_per_s * where.roofline.eff_bw)
    assert values["contention"] == pytest.approx(share, abs=1e-4)
    late = max(donor.reload.late_s[0][1] for donor in found.donors)
    assert found.advice.config().reload_s == pytest.approx(late, abs=1e-3)


# By an independent calculation, rounded: KV tokens for the taker from half of each donor's layers.
HALVES = [
    ("OPT-13b", "35%", ("Llama-2-13b", "Llama-3-8b"), 24_008),
    ("Llama-2-13b", "35%", ("OPT-13b", "Llama-3-8b"), 23_883),
    ("Llama-3-8b", "20%", ("OPT-13b", "Llama-2-13b"), 192_823),
    ("OPT-30b", "65%", ("OPT-6.7b",), 4_682),
    ("OPT-6.7b", "15%", ("OPT-30b",), 56_457),
]


@pytest.mark.parametrize(("name", "share", "donors", "tokens"), HALVES)
def test_donors_give_what_half_of_their_layers_hold(name: str, share: str, donors: Any, tokens: int) -> None:
    found = plan(GH200, model(name), memory_bytes=memory_of(share, GH200), donors=[model(each) for each in donors])
    assert tokens - len(donors) <= sum(donor.tokens_half for donor in found.donors) <= tokens, "each rounded down"
    assert [donor.layers_half for donor in found.donors] == [model(each).layers // 2 for each in donors]
    for donor in found.donors:
        assert donor.layers_free == donor.reload.hidden[0][1]
        assert donor.reload.all_s == pytest.approx(donor.reload.layers * donor.reload.layer_s)


def test_the_arithmetic_is_shown_with_its_numbers() -> None:
    found = plan(GH200, model("OPT-13b"), memory_bytes=memory_of("35%", GH200), donors=[model("Llama-3-8b")])
    steps = {step.what: step for step in found.steps}
    kv = steps["KV cache without remapping"]
    assert kv.value == found.kv_tokens == 11_855
    assert all(part in kv.numbers for part in ("35.92 GB", "25.71 GB", "0.50 GB", "819,200", "11,855"))
    assert steps["loading the whole model back"].value == found.reload.all_s
    assert steps["KV cache from half of Llama-3-8b, idle"].value == found.donors[0].tokens_half
    assert all(step.formula and step.numbers for step in found.steps)


def test_no_request_before_and_some_after() -> None:
    """A cache of fewer tokens than one request: the speed-up is from nothing, and JSON says null."""
    memory = model("OPT-13b").weight_bytes + 500_000_000 + 300 * 819_200
    found = plan(GH200, model("OPT-13b"), memory_bytes=memory, context=512)
    assert (found.balance.rows_before, found.kv_tokens) == (0, 300)
    assert found.balance.rows > 0 and found.balance.speedup == math.inf and found.advice.active
    assert found.as_dict()["balance"]["speedup"] is None and "inf" not in " ".join(found.advice.why)


app = typer.Typer()
app.command()(command)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "120"})


def test_the_command_prints_answer_tables_settings_and_arithmetic() -> None:
    asked = ("--machine", "GH200", "--model", "opt-13b", "--memory", "35%", "--batch", "24", "--donors", "llama-3-8b")
    found = run(*asked)
    assert found.exit_code == 0, found.output
    settings = ("selection='slices'", "REMAP_SELECTION=slices")
    for text in ("11,855 tokens", "6 whole layers", "8.33 layers", *settings, "35.92 GB", "P: Pie Fig 1", "8,520"):
        assert text in found.output, text
    assert any("│ " in line and " 24 " in line for line in found.output.splitlines()), "the batch that was asked for"
    # Layers free of stalls beside "does not pay here" read as two answers: what is hidden stands in the verdict.
    verdicts = [line for line in found.output.splitlines() if line.startswith(("Stream active", "Do not stream"))]
    assert len(verdicts) == 1 and "Free of stalls" not in found.output
    read = json.loads(run("--machine", "h200", "--model", "Llama-3-8b", "--memory", "24GiB", "--json").output)
    assert (read["machine"]["name"], read["memory_bytes"], read["advice"]["active"]) == ("H200-SXM", 24 << 30, False)
    assert [each["rows"] for each in read["limits"] if each["context"] == 512] == [1, 4, 16, 64, 128, 256]
    for name, told in (("H100", True), ("H100-SXM", False)):  # a name of two machines
        assert ("H100-PCIe" in run("--machine", name, "--model", "OPT-13b").output) == told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--machine", "H9", "--model", "OPT-13b"), "GH200-96GB, GB200"),
        (("--machine", "H100-", "--model", "OPT-13b"), "H100-SXM or H100-PCIe"),
        (("--machine", "H100", "--model", "zzz"), "OPT-6.7b, OPT-13b"),
        (("--machine", "H100", "--model", "OPT-13b", "--donors", "zzz"), "OPT-6.7b, OPT-13b"),
        (("--machine", "H100", "--model", "OPT-13b", "--memory", "9 lives"), "memory"),
        (("--machine", "H100", "--model", "OPT-13b", "--context", "4096"), "context"),
        (("--machine", "H100", "--model", "OPT-66b"), "needs at least"),
        (("--machine", "H100", "--model", "OPT-13b", "--memory", "200GiB"), "85.5 GB that H100-SXM has"),
        (("--machine", "H100", "--model", "OPT-13b", "--dtype", "int3"), "bfloat16, float16, fp8"),
        (("--machine", "H100", "--model", "OPT-13b", "--tp", "3"), "40 heads"),
        (("--machine", "H100", "--model", "OPT-13b", "--max-num-seqs", "0"), "max-num-seqs"),
        (("--machine", "H100", "--model", "nowhere/config.json"), "cannot be read"),
        (("--machine", "H100", "--model", "OPT-13b", "--tables", "/nonexistent.json"), "cannot be read"),
    ],
)
def test_the_command_refuses_with_a_message(arguments: tuple[str, ...], text: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2
    assert text in found.output
    assert "Traceback" not in found.output


def test_memory_and_donors_must_fit_on_the_device() -> None:
    h100, opt, llama = machine("H100"), model("OPT-13b"), model("Llama-3-8b")
    assert (memory_of("50%", GH200), memory_of("24GiB", GH200)) == (GH200.hbm_bytes // 2, 24 << 30)
    for bad in ("0%", "101%", "x%", "nan%", "24 apples", -1, 1.5):
        with pytest.raises(InvalidArgument):
            memory_of(bad, GH200)
    assert refused("memory", plan, machine("4090"), opt).needed > machine("4090").hbm_bytes
    for field, value in (("context", 2049), ("context", 0), ("batch", 0), ("max_requests", 0)):
        refused(field, plan, GH200, opt, **{field: value})
    assert refused("memory", plan, h100, opt, memory_bytes=h100.hbm_bytes + 1).available == h100.hbm_bytes
    room = h100.hbm_bytes - opt.weight_bytes
    error = refused("donors", plan, h100, llama, memory_bytes=room + 1, donors=[opt])
    assert error.available == opt.weight_bytes - 1
    assert plan(h100, llama, memory_bytes=room, donors=[opt]).memory_bytes == room
    # Without a memory, what 90 % leaves beside them; and if that is too little, it says so.
    found = plan(h100, llama, donors=[opt])
    assert found.memory_bytes == memory_of(None, h100) - opt.weight_bytes
    assert any("donors" in text for text in found.assumed)
    refused("memory", plan, machine("4090"), model("Llama-2-7b"), donors=[opt])


def test_adapters_accept_every_setting_that_is_advised() -> None:
    memory, donors = memory_of("35%", GH200), [model("OPT-6.7b"), model("Llama-3-8b")]
    found = plan(GH200, model("OPT-13b"), memory_bytes=memory, donors=donors)
    assert {setting.name for setting in found.advice.settings} >= {"contention", "map_s", "reload_s", "policy"}
    settings = Settings.read(found.environment())
    assert settings is not None
    assert settings.controller() == found.advice.config()
    assert (
        settings.arena
        and settings.capacity == memory + sum(each.weight_bytes for each in donors) - found.activation_bytes
    )
    assert settings.link == GH200.h2d_bytes_per_s
    assert found.as_dict()["environment"] == found.environment()


def test_models_on_one_device_are_told_one_capacity_that_it_has() -> None:
    h100, three = machine("H100-SXM"), [model(name) for name in ("Llama-3-8b", "OPT-13b", "Qwen2.5-14B")]
    told = [
        Settings.read(plan(h100, one, donors=[each for each in three if each is not one]).environment())
        for one in three
    ]
    # They share the arena of this size: nothing is added up.
    (capacity,) = {each.capacity for each in told if each is not None}
    assert sum(each.weight_bytes for each in three) < capacity < h100.hbm_bytes
    assert len({each.arena for each in told if each is not None}) == 1
    alone = Settings.read(plan(h100, three[0]).environment())
    assert alone is not None and not alone.arena


def test_the_most_requests_are_a_setting_and_named_where_they_limit() -> None:
    memory = memory_of("20%", GH200)
    few, many = (plan(GH200, model("Llama-3-8b"), memory_bytes=memory, max_requests=most) for most in (64, 512))
    assert few.balance.rows == 64 and "--max-num-seqs 64 was the limit" in few.advice.why[0]
    assert many.balance.rows > 64 and not any("--max-num-seqs" in text for text in many.advice.why)


def test_fp8_halves_the_matrices_and_nothing_else() -> None:
    whole = model("Llama-3-8b")
    small = in_dtype(whole, "fp8")
    assert small.layer_bytes == whole.layer_bytes - whole.matrix_size // 2
    assert (small.resident_bytes, small.kv_bytes_per_token) == (whole.resident_bytes, whole.kv_bytes_per_token)
    assert in_dtype(small, "bf16") == whole == in_dtype(whole, "float16")
    double = in_dtype(whole, "fp32")
    assert double.weight_bytes == 2 * whole.weight_bytes and in_dtype(double, "bfloat16") == whole
    refused("dtype", in_dtype, whole, "int4")
    refused("dtype", in_dtype, whole, None)
    slow, fast = Roofline(GH200, whole).layer_s(0, 0, 1, 512), Roofline(GH200, small).layer_s(0, 0, 1, 512)
    assert 0.5 < fast / slow < 0.7, "one request reads half of the bytes"
    found = plan(GH200, small, memory_bytes=memory_of("20%", GH200))
    assert any("8 bits an element" in text for text in found.assumed)


@pytest.mark.parametrize("name", ["Llama-3.1-70B", "OPT-13b", "Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-120b"])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_shares_of_a_layer_add_up(name: str, devices: int) -> None:
    whole, part = model(name), sharded(model(name), devices)
    rest = whole.layer_bytes - whole.matrix_size
    copied = max(1, devices // whole.kv_heads)  # of each KV head
    keys = 2 * whole.kv_heads * whole.head_dim * whole.hidden * whole.dtype_bytes
    assert devices * (part.layer_bytes - rest) == whole.layer_bytes - rest + (copied - 1) * keys
    assert part.kv_bytes_per_token * devices == whole.kv_bytes_per_token * copied
    assert whole.weight_bytes / devices <= part.weight_bytes < 1.15 * whole.weight_bytes / devices
    assert sharded(whole, 1) is whole
    roof = Roofline(GH200, part)
    assert roof.layer_s(0, 0, 64, 64 * 512) < Roofline(GH200, whole).layer_s(0, 0, 64, 64 * 512)


def test_devices_that_do_not_divide_are_refused() -> None:
    for devices in (0, 3, 7, True, 1.5, 4096):
        refused("tp", sharded, model("Llama-3-8b"), devices)
    found = plan(machine("H100"), model("Llama-3.1-70B"), tp=4)
    assert found.tp == 4 and found.model.heads == 16
    assert any("tensor parallelism over 4 devices" in text for text in found.assumed)
    refused("memory", plan, machine("H100"), model("Llama-3.1-70B"))


@pytest.mark.parametrize("devices", [2, 8, 16])
def test_a_latent_is_copied_and_its_heads_are_divided(devices: int) -> None:
    whole, part = model("DeepSeek-V3"), sharded(model("DeepSeek-V3"), devices)
    assert (part.kv_bytes_per_token, part.heads) == (whole.kv_bytes_per_token, 128 // devices)
    rest = whole.layer_bytes - whole.matrix_size
    copied = 7168 * (1536 + 576)  # what projects to the latents, in fp8
    assert devices * (part.layer_bytes - rest - copied) == whole.layer_bytes - rest - copied
    assert (
        whole.weight_bytes / devices <= part.weight_bytes < whole.weight_bytes / devices + 1.02 * (rest + copied) * 58
    )


def test_dtypes_of_mixtures() -> None:
    for name, dtype in (("DeepSeek-V3", "fp8"), ("gpt-oss-20b", "mxfp4")):
        whole = in_dtype(model(name), "bf16")
        parameters = {"DeepSeek-V3": 671_026_404_352, "gpt-oss-20b": 20_914_757_184}[name]
        assert whole.weight_bytes == pytest.approx(2 * parameters, rel=1e-6)
        assert in_dtype(whole, dtype) == model(name)
    refused("dtype", in_dtype, model("OPT-13b"), "mxfp4")


@pytest.mark.parametrize("name", ["Mixtral-8x7B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize(("context", "rows"), [(8192, 25), (32768, 4)])
def test_a_mixture_is_planned_at_any_batch(name: str, context: int, rows: int) -> None:
    found = plan(machine("H200"), model(name), context=context, max_requests=rows)
    assert found.balance.rows == rows and {1, 4, 16} < {each.rows for each in found.limits}
    (told,) = (text for text in found.assumed if "experts" in text)
    read = {("Mixtral-8x7B", 25): 7, ("Mixtral-8x7B", 4): 4, ("Qwen3-30B-A3B", 25): 78, ("Qwen3-30B-A3B", 4): 27}
    assert f"{read[name, rows]} with {rows} requests" in told and "90 %" in told
    (told,) = (text for text in plan(machine("H200"), model(name), batch=2).assumed if "experts" in text)
    assert "with 2 requests" in told


def test_large_mixtures_are_planned_and_say_what_is_assumed() -> None:
    plans = {}
    for name, devices in (("gpt-oss-120b", 1), ("DeepSeek-V3", 8)):
        found, notes = find_model(name)
        plans[name] = plan(machine("H200"), found, context=8192, tp=devices, assumed=notes)
    small, large = plans["gpt-oss-120b"].assumed, plans["DeepSeek-V3"].assumed
    assert any("4.25 bits" in text for text in small) and any("attends to 128 tokens" in text for text in small)
    assert any("3 layers of DeepSeek-V3" in text for text in large) and any(
        "KV heads are copied" in text for text in large
    )
    most = (memory_of(None, machine("H200")) - 673e9 / 8 - 500e6) / (576 * 2 * 61)
    assert 0.97 * most < plans["DeepSeek-V3"].kv_tokens < most, "what projects to the latents is on each device"
    refused("memory", plan, machine("H200"), model("DeepSeek-V3"))
    refused("x.assumed", find_model, "x", {"models": {"x": {"like": "OPT-13b", "assumed": "nothing"}}})


def test_a_plan_says_how_far_a_fitted_machine_is_off() -> None:
    def on(misfit: float) -> Any:
        return machine("x", {"machines": {"x": {"like": "H200", "misfit": {"linear": misfit, "h2d": 0.01}}}})

    (told,) = plan(on(0.04), model("OPT-13b")).assumed
    assert "4.0%" in told and "WARNING" not in told
    (told,) = plan(on(0.3), model("OPT-13b")).assumed
    assert told.startswith("WARNING") and "30.0%" in told and "linear" in told
    assert refused("machine", plan, on(1.245), model("OPT-13b")).misfit == 1.245
