"""Settings of engine plugins: what the environment may say, and that nothing else is taken for it."""

from __future__ import annotations

import pytest

from remap import InvalidArgument
from remap.adapters.settings import Settings, enabled
from remap.advanced import Knobs

ON = {"REMAP_ENABLE": "1", "REMAP_CAPACITY": "600MiB"}


def test_nothing_is_read_unless_it_is_switched_on():
    nonsense = {"REMAP_CAPACITY": "much", "REMAP_SLOWDOWN": "x"}
    assert Settings.read({}) is None
    for off in ("", "0", "false", "No", "OFF"):
        assert Settings.read({**nonsense, "REMAP_ENABLE": off}) is None
        assert not enabled({"REMAP_ENABLE": off})
    for on in ("1", "true", "Yes", "ON"):
        assert enabled({"REMAP_ENABLE": on})


def test_every_variable_reaches_its_field():
    settings = Settings.read(
        {
            **ON,
            "REMAP_SLOWDOWN": "0.5",
            "REMAP_MAX_LAYERS": "3",
            "REMAP_MAX_TOKENS": "4096",
            "REMAP_RESERVE_BLOCKS": "7",
            "REMAP_PAGE_BYTES": "65536",
            "REMAP_COPY_CHUNK_BYTES": "16MiB",
            "REMAP_BUFFERS": "2",
            "REMAP_LINK": "24GB",
            "REMAP_REVERSION": "0",
            "REMAP_SELECTION": "slices",
            "REMAP_CONTENTION": "0.25",
            "REMAP_MAP_S": "0.002",
            "REMAP_POLICY": "mru",
            "REMAP_MIN_IDLE": "4.0",
            "REMAP_RELOAD_S": "0.25",
            "REMAP_TTFT_S": "0.5",
            "REMAP_TBT_S": "0.05",
            "REMAP_LENDS": "0",
            "REMAP_UNKNOWN": "is somebody else's",
        }
    )
    assert settings == Settings(
        capacity=600 * 2**20,
        slowdown=0.5,
        max_layers=3,
        max_tokens=4096,
        reserve_blocks=7,
        page_bytes=65536,
        copy_chunk_bytes=16 << 20,
        buffers=2,
        link=24 * 10**9,
        reversion=False,
        **(
            sharing := {
                "selection": "slices",
                "contention": 0.25,
                "map_s": 0.002,
                "policy": "mru",
                "min_idle": 4.0,
                "reload_s": 0.25,
                "ttft_s": 0.5,
                "tbt_s": 0.05,
                "lends": False,
            }
        ),
    )
    assert settings.controller() == Knobs(
        slowdown=0.5, max_layers=3, reserve_blocks=7, buffers=2, reversion=False, **sharing
    )


def test_what_is_not_set_or_empty_is_as_the_controller_has_it():
    bare = Settings.read(ON)
    assert bare == Settings(capacity=600 * 2**20)
    assert bare.controller() == Knobs()
    assert (
        bare.copy_chunk_bytes == 32 << 20 and Settings.read({**ON, "REMAP_COPY_CHUNK_BYTES": "0"}).copy_chunk_bytes == 0
    )
    empty = dict.fromkeys(("REMAP_SLOWDOWN", "REMAP_MAX_LAYERS", "REMAP_MAX_TOKENS", "REMAP_PAGE_BYTES"), "")
    assert Settings.read({**ON, **empty, "REMAP_BUFFERS": "", "REMAP_LINK": ""}) == bare


def test_a_layer_count_of_zero_is_a_cap_of_zero():
    assert Settings.read({**ON, "REMAP_MAX_LAYERS": "0"}).controller().max_layers == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REMAP_ENABLE", "maybe"),
        ("REMAP_CAPACITY", ""),
        ("REMAP_CAPACITY", "0"),
        ("REMAP_CAPACITY", "-5"),
        ("REMAP_CAPACITY", "24 gigabytes"),
        ("REMAP_SLOWDOWN", "-0.1"),
        ("REMAP_SLOWDOWN", "nan"),
        ("REMAP_CAPACITY", "1" * 400),
        ("REMAP_CAPACITY", "1" * 6000),
        ("REMAP_CAPACITY", "1" * 400 + "GiB"),
        ("REMAP_MAX_LAYERS", "1" * 6000),
        ("REMAP_SELECTION", "all"),
        ("REMAP_POLICY", "fifo"),
        ("REMAP_CONTENTION", "-1"),
        ("REMAP_MAP_S", "1" * 400),
        ("REMAP_LENDS", "perhaps"),
        ("REMAP_SLOWDOWN", "inf"),
        ("REMAP_SLOWDOWN", "fast"),
        ("REMAP_MAX_LAYERS", "-1"),
        ("REMAP_MAX_LAYERS", "2.5"),
        ("REMAP_MAX_LAYERS", "²"),
        ("REMAP_MAX_TOKENS", "0"),
        ("REMAP_RESERVE_BLOCKS", "some"),
        ("REMAP_PAGE_BYTES", "0"),
        ("REMAP_COPY_CHUNK_BYTES", "-1"),
        ("REMAP_BUFFERS", "3"),
        ("REMAP_LINK", "fast"),
        ("REMAP_REVERSION", "sometimes"),
    ],
)
def test_a_value_that_cannot_be_names_its_variable(name: str, value: str):
    with pytest.raises(InvalidArgument) as caught:
        Settings.read({**ON, name: value})
    assert caught.value.name == name
    assert caught.value.value == (value or None)
    assert name in str(caught.value)


def test_the_capacity_is_required():
    with pytest.raises(InvalidArgument) as caught:
        Settings.read({"REMAP_ENABLE": "1"})
    assert caught.value.name == "REMAP_CAPACITY"
