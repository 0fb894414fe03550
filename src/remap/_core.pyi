# The C++ core, for the type checker; tools/import_rules.py says which modules may use it.

from typing import Any

def __getattr__(name: str) -> Any: ...
