"""remap.attach over families of models, adapters of peft, quantised weights; and what does not fit is refused."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from attached_models import as_cache, llama, prompts, randomised, watched  # noqa: E402
from torch import nn  # noqa: E402

import families  # noqa: E402
import remap  # noqa: E402
from families import FAMILIES  # noqa: E402
from remap.errors import InvalidArgument  # noqa: E402
from seen import SEEN, Seen  # noqa: E402

GREEDY = {"max_new_tokens": 60, "do_sample": False}
BRIEF = {"max_new_tokens": 2, "do_sample": False}
# Where every head has keys of its own a token takes more, and where few layers have keys less; a mixture's layers are large, and
# so is what has to be free before one comes home.
SIZES = {
    "falcon": {"batch": 16},
    "falcon-grouped": {"batch": 4},
    "starcoder": {"batch": 16},
    "opt": {"batch": 4},
    "gpt2": {"batch": 4},
    "gpt-neox": {"batch": 4},
    "phi": {"batch": 4},
    "bloom": {"batch": 4},
    "mixtral": {"spare": 95},
    "qwen3-next": {"batch": 20},
    "qwen3.5": {"batch": 20},
    "qwen3.5-pictures": {"batch": 20},
    "qwen2-audio": {"batch": 4},
}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(family):
    return randomised(families.made(family, small=True), size=0.3 if family == "bloom" else 0.12)


def _same_under_pressure(model, batch=8, spare=70, seen=None):
    """Greedy and beam tokens of the attached model are those of before, though layers go and come. seen: with a picture in
    each prompt, or a sound."""
    given = prompts(batch, 9, padded=3)
    if seen is not None:
        given, other = seen.given(given), seen.given(given, seed=1)
    text = given["input_ids"].shape[1]
    beams = {"max_new_tokens": 20, "do_sample": False, "num_beams": 2}
    expected = [model.generate(**given, **how) for how in (GREEDY, beams)]
    assert max(len({*row}) for row in expected[0][:, text:].tolist()) > 3, (
        "the model repeats itself: the test shows nothing"
    )
    assert seen is None or not torch.equal(model.generate(**other, **GREEDY), expected[0])
    with watched(model, spare=spare) as rig:
        assert torch.equal(model.generate(**given, **GREEDY), expected[0])
        rig.assert_moved()
        assert torch.equal(model.generate(**given, **beams), expected[1])
        rig.assert_home(lambda: model.generate(**prompts(1, 2), **BRIEF))
        assert torch.equal(model.generate(**given, **GREEDY), expected[0])
        windows = rig.attached.shape.windows
    assert torch.equal(model.generate(**given, **GREEDY), expected[0])
    return windows


@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.attaches])
def test_tokens_of_a_family(family):
    windows = _same_under_pressure(make(family), **SIZES.get(family, {}), seen=SEEN.get(family))
    config = families.config_of(family, small=True).get_text_config()
    sizes = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    assert set(windows) == {getattr(config, sizes.get(kind, ""), None) for kind in kinds}


@pytest.mark.parametrize(("family", "implementation"), [("gemma2", "eager"), ("mistral", "sdpa")])
def test_attention_implementations_see_what_a_dynamic_cache_shows(family, implementation):
    model = make(family)
    model.set_attn_implementation(implementation)
    _same_under_pressure(model)


def test_bfloat16_and_a_model_of_another_dtype_than_its_name_says():
    model = make("llama").to(torch.bfloat16)
    given = prompts(6, 9)
    expected = model.generate(**given, **GREEDY)
    with watched(model, spare=30) as rig:
        assert rig.tenant.kv.spec.dtype == "bfloat16"
        assert torch.equal(model.generate(**given, **GREEDY), expected)
        rig.assert_moved()
    with watched(model, dtype="float32"):  # a wider pool keeps keys and values exactly
        assert torch.equal(model.generate(**given, **GREEDY), expected)
    with watched(model, dtype="float16"), pytest.raises(InvalidArgument, match=r"attach\(dtype='float32'\)"):
        model.generate(**given, **GREEDY)


TINY = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2}
REFUSED = {
    "T5ForConditionalGeneration": ("encoder_decoder", {"vocab_size": 101, "d_model": 64, "num_layers": 2}),
    "WhisperForConditionalGeneration": ("encoder_decoder", families.FAMILIES["whisper"].shape),
    "MllamaForConditionalGeneration": (
        "cross_attention",
        {"text_config": TINY | {"num_attention_heads": 4, "cross_attention_layers": [1], "pad_token_id": 0}}
        | {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}},
    ),
    "GlmMoeDsaForCausalLM": (  # an index beside latents
        "layer_types",
        TINY
        | {"intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
        | {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "q_lora_rank": 16}
        | {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
        | {"index_head_dim": 16, "index_n_heads": 2},
    ),
    "MambaForCausalLM": ("layer_types", TINY),  # no layer with keys and values
}


@pytest.mark.parametrize("architecture", REFUSED)
def test_caches_of_other_kinds_are_refused(architecture):
    (what, shape), made = REFUSED[architecture], getattr(transformers, architecture)
    model = made(made.config_class(**shape))
    with pytest.raises(InvalidArgument) as refused:
        remap.attach(model, "64MiB")
    assert refused.value.what == what
    assert "forward" not in model.__dict__


def test_layers_under_a_name_of_their_own_are_found():
    shape = TINY | {"num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 160, "is_decoder": True}
    model = randomised(transformers.BertLMHeadModel(transformers.BertConfig(**shape)))
    assert _same_under_pressure(model, batch=4) == (None,) * 5
    model.more = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))  # which of them?
    with pytest.raises(InvalidArgument, match="found no layer list") as refused:
        remap.attach(model, "64MiB")
    assert refused.value.candidates == {"bert.encoder.layer": 5, "more": 5}


def test_layers_of_the_part_that_writes_are_found():
    """Of SmolVLM, whose configuration names the layers of its parts only."""
    shape = TINY | {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 160, "model_type": "llama"}
    vision = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56, "patch_size": 14}
    config = transformers.SmolVLMConfig(image_token_id=100, scale_factor=2, text_config=shape, vision_config=vision)
    seen = Seen("image", "", {}, {}, spread=4, tensors={"pixel_values": (1, 1, 3, 56, 56)})
    model = randomised(transformers.SmolVLMForConditionalGeneration(config))
    assert _same_under_pressure(model, batch=4, seen=seen) == (None,) * 4


def test_projections_have_the_last_word():
    model = make("llama")
    model.config.num_key_value_heads = 4
    with pytest.raises(InvalidArgument) as refused:
        remap.attach(model, "64MiB")
    assert (refused.value.found, refused.value.expected, refused.value.layer) == (32, 64, 0)


# -- adapters ---------------------------------------------------------------------------------------------------------


def _lora(model):
    peft = pytest.importorskip("peft", reason="peft is not installed (pip install '.[test-transformers]')")
    torch.manual_seed(5)
    made = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    return made


@pytest.mark.parametrize("merged", [False, True])
def test_lora_adapters_stream_with_their_layers(merged):
    bare = llama(layers=4)
    without = bare.generate(**prompts(8, 9, padded=3), **GREEDY)
    model = _lora(bare)
    assert not torch.equal(model.generate(**prompts(8, 9, padded=3), **GREEDY), without), "the adapter does nothing"
    _same_under_pressure(model.merge_and_unload() if merged else model)


def test_a_lora_adapter_is_switched_off_and_on_while_attached():
    model, given = _lora(llama(layers=4)), prompts(8, 9)
    with model.disable_adapter():
        off = model.generate(**given, **GREEDY)
    on = model.generate(**given, **GREEDY)
    with watched(model, spare=70) as rig:
        with model.disable_adapter():
            assert torch.equal(model.generate(**given, **GREEDY), off)
        assert torch.equal(model.generate(**given, **GREEDY), on)
        with torch.no_grad():  # a direct call goes around the inner model's __call__
            cache = rig.attached.cache()
            logits = model(given["input_ids"], **as_cache(cache)).logits
            assert cache.get_seq_length() == 9
        rig.assert_moved()
    with torch.no_grad():
        assert torch.equal(model(given["input_ids"]).logits, logits)


# -- quantised weights ------------------------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weight-only int8 with one scale a row: buffers, no parameters."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("quantised", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.to(torch.float32))
        self.out_features = linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.quantised.to(x.dtype) * self.scale.to(x.dtype))


def test_int8_buffers_move_with_their_layer():
    model = llama(layers=6)
    full = model.generate(**prompts(8, 9, padded=3), **GREEDY)
    for layer in model.model.layers:
        for path, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, name = path.rpartition(".")
                setattr(layer.get_submodule(parent), name, Int8Linear(module))
    assert not torch.equal(model.generate(**prompts(8, 9, padded=3), **GREEDY), full), "the weights are not quantised"
    assert torch.int8 in {tensor.dtype for tensor in model.model.layers[0].buffers()}
    # A quarter of the bytes: a layer is some 12 KiB of int8 here, and pressure still moves it.
    _same_under_pressure(model, batch=3, spare=56)


def test_tensor_subclasses_of_a_quantiser_are_refused_and_named():
    """A wrapper subclass keeps its bytes in inner tensors, which cannot be moved by exchanging `.data`."""
    from torch.utils._python_dispatch import return_and_correct_aliasing

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls, inner, scale):
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32)

        def __init__(self, inner, scale):
            self.inner, self.scale = inner, scale

        def __tensor_flatten__(self):
            return ["inner", "scale"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, meta, size, stride):
            return cls(inner["inner"], inner["scale"])

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.detach.default:
                return return_and_correct_aliasing(func, args, kwargs or {}, cls(args[0].inner, args[0].scale))
            plain = [each.inner.float() * each.scale if isinstance(each, Wrapped) else each for each in args]
            return func(*plain, **(kwargs or {}))

    model = llama(layers=4)
    given = prompts(2, 5)
    projection = model.model.layers[2].mlp.down_proj
    weight = projection.weight.detach()
    projection.weight = nn.Parameter(Wrapped((weight * 100).round().to(torch.int8), 0.01), requires_grad=False)
    expected = model.generate(**given, **GREEDY)
    with pytest.raises(InvalidArgument) as refused:
        remap.attach(model, "64MiB")
    assert refused.value.path == "model.layers.2.mlp.down_proj.weight"
    assert "unwrap it" in str(refused.value)
    assert torch.equal(model.generate(**given, **GREEDY), expected)


def test_torchao_weights_are_refused_and_named():
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed (pip install torchao)")
    model = llama(layers=4)
    config = quantization.Int8WeightOnlyConfig()
    quantization.quantize_(model, config, filter_fn=lambda module, name: name.endswith("q_proj"))
    model.generate(**prompts(2, 5), **BRIEF)
    with pytest.raises(InvalidArgument) as refused:
        remap.attach(model, "64MiB")
    assert refused.value.path == "model.layers.0.self_attn.q_proj.weight"
