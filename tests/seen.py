"""What families with pictures or sound are given: a processor beside their weights, for engines that load folders, and noise as
tensors, for transformers.

Needs neither torch nor transformers until one is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["SEEN", "Seen"]

_AT = 100
"""Token id that stands for a part of a picture, or of a sound, in all families."""


@dataclass(frozen=True)
class Seen:
    """kind: "image" or "audio", as vLLM names it. processor: a class of transformers; parts: its arguments' classes, and theirs;
    more: its other arguments. tokens: token -> id, of its tokenizer; names: attribute of the tokenizer -> token. before, after:
    ids around the parts. spread: as many parts has what `tensors` gives, name -> shape behind the batch's, or a value a row.
    always: whether each prompt has one."""

    kind: str
    processor: str
    parts: dict[str, tuple[str, dict[str, Any]]]
    tokens: dict[str, int]
    names: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    before: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    spread: int = 0
    tensors: dict[str, tuple[int, ...] | list[Any]] = field(default_factory=dict)
    always: bool = False

    @property
    def marks(self) -> list[int]:
        """What stands in a prompt for one picture, or sound, until a processor spreads it."""
        return self.before + ([_AT] if self.tokens else []) + self.after

    def save(self, vocabulary: int, folder: Path) -> None:
        """Processor and tokenizer: a token is a word."""
        import tokenizers
        import transformers

        lines = {"\n" * count: count for count in (1, 2, 3, 4)}  # Gemma's processor looks them up
        named = {"</s>": 5, "<unk>": 6, **lines, **self.tokens}
        words = {index: word for word, index in named.items()}
        table = {words.get(index, f"w{index}"): index for index in range(vocabulary)}
        made = tokenizers.Tokenizer(tokenizers.models.WordLevel(table, unk_token="<unk>"))
        made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        ends = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
        special = self.names or [*self.tokens]
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, extra_special_tokens=special, **ends)
        parts = {name: getattr(transformers, each)(**how) for name, (each, how) in self.parts.items()}
        getattr(transformers, self.processor)(tokenizer=tokenizer, **parts, **self.more).save_pretrained(folder)

    def given(self, prompts: dict[str, Any], seed: int = 0) -> dict[str, Any]:
        """The prompts of a batch, left-padded, with one picture, or sound, at the end of each; seed: of its noise."""
        import torch

        batch = len(prompts["input_ids"])
        draw = torch.Generator().manual_seed(seed)
        parts = torch.tensor([self.before + [_AT] * self.spread + self.after] * batch)
        ids = torch.cat([prompts["input_ids"] % 90, parts, prompts["input_ids"][:, -4:] % 90], 1)
        mask = torch.cat([prompts["attention_mask"], torch.ones_like(ids[:, prompts["input_ids"].shape[1] :])], 1)
        kinds = (ids == _AT).long()
        made: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        for name, shape in self.tensors.items():
            if name.endswith("type_ids"):
                made[name] = kinds
            elif isinstance(shape, list):
                made[name] = torch.tensor([shape] * batch)
            else:
                made[name] = torch.randn((batch * shape[0], *shape[1:]), generator=draw)
        return made


_SIZE = {"height": 56, "width": 56}
_QWEN = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}}


def _qwen(processor: str, video: str, patch: int) -> Seen:
    tokens = {"<|vision_start|>": 97, "<|vision_end|>": 98, "<|video_pad|>": 99, "<|image_pad|>": _AT}
    how = {**_QWEN, "patch_size": patch}
    return Seen(
        "image",
        processor,
        {"image_processor": ("Qwen2VLImageProcessor", how), "video_processor": (video, how)},
        tokens,
        dict(zip(("vision_start_token", "vision_end_token", "video_token", "image_token"), tokens)),
        before=[97],
        after=[98],
        spread=4,
        tensors={"pixel_values": (16, 6 * patch * patch), "image_grid_thw": [1, 4, 4], "mm_token_type_ids": []},
    )


SEEN = {
    "qwen2.5-vl": _qwen("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    "qwen3-vl": _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
    "qwen3.5-pictures": _qwen("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 14),
    "gemma3-pictures": Seen(
        "image",
        "Gemma3Processor",
        {"image_processor": ("Gemma3ImageProcessor", {"size": _SIZE})},
        {"<start_of_image>": 98, "<end_of_image>": 99, "<image_soft_token>": _AT},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        {"image_seq_length": 4},
        before=[98],
        after=[99],
        spread=4,
        tensors={"pixel_values": (1, 3, 56, 56), "token_type_ids": []},
    ),
    "llava": Seen(
        "image",
        "LlavaProcessor",
        {"image_processor": ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": _SIZE})},
        {"<image>": _AT},
        more={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        spread=16,
        tensors={"pixel_values": (1, 3, 56, 56)},
    ),
    "mistral3": Seen(
        "image",
        "PixtralProcessor",
        {
            "image_processor": (
                "PixtralImageProcessor",
                {"size": {"longest_edge": 84}, "patch_size": {"height": 28, "width": 28}},
            )
        },
        {"[IMG_BREAK]": 98, "[IMG_END]": 99, "[IMG]": _AT},
        more={"patch_size": 14, "spatial_merge_size": 2},
        spread=4,
        tensors={"pixel_values": (1, 3, 56, 56), "image_sizes": [56, 56]},
    ),
    "internvl": Seen(
        "image",
        "InternVLProcessor",
        {
            "image_processor": ("GotOcr2ImageProcessor", {"size": _SIZE, "max_patches": 4, "crop_to_patches": True}),
            "video_processor": ("InternVLVideoProcessor", {"size": _SIZE}),
        },
        {"<img>": 97, "</img>": 98, "<video>": 99, "<IMG_CONTEXT>": _AT},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        {"image_seq_length": 4},
        spread=4,
        tensors={"pixel_values": (1, 3, 56, 56)},
    ),
    "qwen2-audio": Seen(
        "audio",
        "Qwen2AudioProcessor",
        {"feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 80})},
        {"<|audio_bos|>": 98, "<|audio_eos|>": 99, "<|AUDIO|>": _AT},
        before=[98],
        after=[99],
        spread=25,
        tensors={"input_features": (1, 80, 3000), "feature_attention_mask": [1] * 100 + [0] * 2900},
    ),
    "whisper": Seen(
        "audio",
        "WhisperProcessor",
        {"feature_extractor": ("WhisperFeatureExtractor", {"feature_size": 80, "chunk_length": 2})},
        {},
        always=True,
    ),
}
