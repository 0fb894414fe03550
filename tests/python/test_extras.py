"""What is missing is named by its packages: no index is asked for remap itself."""

from __future__ import annotations

import importlib.metadata as metadata
from typing import Any

import pytest

from remap.extras import install


def of(monkeypatch: pytest.MonkeyPatch, stated: Any) -> None:
    def requires(name: str) -> Any:
        if isinstance(stated, Exception):
            raise stated
        return stated

    monkeypatch.setattr(metadata, "requires", requires)


def test_the_packages_of_the_extra_are_named_with_their_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    of(
        monkeypatch,
        ["always>=1", 'typer>=0.12; extra == "cli"', 'rich>=13 ; extra == "cli"', 'ray>=2; extra == "cluster"'],
    )
    assert install("cli") == "pip install 'typer>=0.12' 'rich>=13'"
    assert install("cluster") == "pip install 'ray>=2'"


@pytest.mark.parametrize("stated", [None, [], ["always>=1"], metadata.PackageNotFoundError("remap")])
def test_without_metadata_the_command_is_for_a_clone(monkeypatch: pytest.MonkeyPatch, stated: Any) -> None:
    of(monkeypatch, stated)
    assert install("sim") == "pip install '.[sim]', in a clone of remap"


def test_each_extra_that_a_message_names_exists() -> None:
    if metadata.requires("remap") is None:
        pytest.skip("remap is not installed: there is no metadata to read")
    for extra in ("cli", "sim", "torch", "demo", "vllm", "cluster", "transformers"):
        assert install(extra).startswith("pip install '") and ".[" not in install(extra), extra
