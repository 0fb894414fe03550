"""remap: turn model weights into KV cache while serving, and back.

Importing this package loads neither torch nor an inference engine. See `Session` for the way in.
"""

from __future__ import annotations

from . import schedule
from .controller import ControllerConfig, Demand
from .entry import attach
from .errors import (
    ArenaBroken,
    DriverError,
    Error,
    ForkedProcess,
    InvalidArgument,
    InvalidState,
    LimitExceeded,
    OutOfBlocks,
    OutOfMemory,
    StalePlan,
)
from .kv_geometry import KVSpec
from .session import Session
from .snapshot import Snapshot, StepReport, TenantSnapshot
from .tenant import Tenant

__version__ = "0.1.0"

__all__ = [
    "ArenaBroken",
    "ControllerConfig",
    "Demand",
    "DriverError",
    "Error",
    "ForkedProcess",
    "InvalidArgument",
    "InvalidState",
    "KVSpec",
    "LimitExceeded",
    "OutOfBlocks",
    "OutOfMemory",
    "Session",
    "Snapshot",
    "StalePlan",
    "StepReport",
    "Tenant",
    "TenantSnapshot",
    "__version__",
    "attach",
    "schedule",
]
