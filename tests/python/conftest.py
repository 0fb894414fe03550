"""Of the tests of the library: all fixtures are those of suite.py."""

from suite import backend, backend_name, emulated, on_the_device_under_test, pytest_collection_modifyitems, young_heap

__all__ = [
    "backend",
    "backend_name",
    "emulated",
    "on_the_device_under_test",
    "pytest_collection_modifyitems",
    "young_heap",
]
