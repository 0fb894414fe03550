# SPDX-License-Identifier: Apache-2.0
"""The commands of `remap` that stand on the engine, the cluster and the simulator. pyproject.toml beside names them."""

from __future__ import annotations
