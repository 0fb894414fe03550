# SPDX-License-Identifier: Apache-2.0
"""remap: turn model weights into KV cache while serving, and back.

Importing this package loads neither torch nor an inference engine. See `Session` for the way in.
"""

from __future__ import annotations

import logging

from remap.config import Config
from remap.kv.spec import KVSpec
from remap.policy.views import Demand
from remap.report import Snapshot, StallShare, StepReport, TenantSnapshot

from . import advanced, schedule
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
from .session import Session
from .tenant import Tenant

__version__ = "0.1.0"

# Where the process has set up no logging, Python would print a library's warnings: this one prints nothing.
logging.getLogger("remap").addHandler(logging.NullHandler())

__all__ = [
    "ArenaBroken",
    "Config",
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
    "StallShare",
    "StepReport",
    "Tenant",
    "TenantSnapshot",
    "__version__",
    "advanced",
    "attach",
    "schedule",
]
