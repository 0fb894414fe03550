"""Settings of engine plugins: what the environment may say, and that nothing else is taken for it."""

from __future__ import annotations

import pytest

from remap import InvalidArgument
from remap.adapters.settings import Settings, enabled
from remap.advanced import Knobs

ON = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": "600MiB"}
# What the variable says, and what its field (of the same name) is then.
SETTINGS = {
    "max_tokens": ("4096", 4096), "page_bytes": ("65536", 65536), "copy_chunk_bytes": ("16MiB", 16 << 20),
    "link": ("24GB", 24 * 10**9),
}  # fmt: skip
KNOBS = {
    "slowdown": ("0.5", 0.5), "max_layers": ("3", 3), "reserve_blocks": ("7", 7), "buffers": ("2", 2), "lends": ("0", False),
    "reversion": ("0", False), "selection": ("slices", "slices"), "contention": ("0.25", 0.25), "map_s": ("0.002", 0.002),
    "policy": ("mru", "mru"), "min_idle": ("4.0", 4.0), "ttft_s": ("0.5", 0.5),
    "reload_s": ("0.25", 0.25), "tbt_s": ("0.05", 0.05),
}  # fmt: skip


def test_nothing_is_read_unless_it_is_switched_on():
    nonsense = {"REMAP_CAPACITY": "much", "REMAP_SLOWDOWN": "x"}
    assert Settings.read({}) is None
    for off in ("", "0", "false", "No", "OFF"):
        assert Settings.read({**nonsense, "REMAP_ENABLE": off}) is None
        assert not enabled({"REMAP_ENABLE": off})
    assert all(enabled({"REMAP_ENABLE": on}) for on in ("1", "true", "Yes", "ON"))


def test_every_variable_reaches_its_field():
    given = {_variable(name): text for name, (text, _) in (SETTINGS | KNOBS).items()}
    settings = Settings.read({**ON, **given, "REMAP_UNKNOWN": "is somebody else's"})
    values = {name: value for name, (_, value) in (SETTINGS | KNOBS).items()}
    assert settings == Settings(capacity=600 * 2**20, **values)
    assert settings.controller() == Knobs(**{name: values[name] for name in KNOBS})


def test_what_is_not_set_or_empty_is_as_the_controller_has_it():
    bare, numbers = Settings.read(ON), set(SETTINGS | KNOBS) - {"lends", "reversion", "selection", "policy"}
    empty = {_variable(name): "" for name in numbers}
    assert bare == Settings(capacity=600 * 2**20) == Settings.read({**ON, **empty})
    assert bare.controller() == Knobs()
    assert Settings.read({**ON, "REMAP_COPY_CHUNK_BYTES": "0"}).copy_chunk_bytes == 0 and bare.copy_chunk_bytes is None
    assert Settings.read({**ON, "REMAP_MAX_LAYERS": "0"}).controller().max_layers == 0  # a cap of zero


def _variable(name):
    return f"REMAP_{name.upper()}"


WRONG = {
    "ENABLE": ["maybe"],
    "CAPACITY": ["", "0", "-5", "24 gigabytes", "1" * 400, "1" * 6000, "1" * 400 + "GiB"],
    "SLOWDOWN": ["-0.1", "nan", "inf", "fast"],
    "MAX_LAYERS": ["-1", "2.5", "²", "1" * 6000],
    "MAP_S": ["1" * 400],
    "CONTENTION": ["-1"],
    "BUFFERS": ["3"],
    **{name: ["0"] for name in ("MAX_TOKENS", "PAGE_BYTES")},
    "COPY_CHUNK_BYTES": ["-1"],
    **{name: ["some"] for name in ("SELECTION", "POLICY", "LENDS", "RESERVE_BLOCKS", "LINK", "REVERSION")},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_that_cannot_be_names_its_variable(name: str, value: str):
    with pytest.raises(InvalidArgument, match=f"REMAP_{name}") as caught:
        Settings.read({**ON, f"REMAP_{name}": value})
    assert (caught.value.name, caught.value.value) == (f"REMAP_{name}", value or None)


def test_the_capacity_is_required():
    with pytest.raises(InvalidArgument) as caught:
        Settings.read({"REMAP_ENABLE": "1"})
    assert caught.value.name == "REMAP_CAPACITY"
