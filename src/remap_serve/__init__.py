# SPDX-License-Identifier: Apache-2.0
"""What is built on remap: the reference engine, `serve-many`, the cluster, offline batches, the simulator and the demos.

The library is `remap`, which knows nothing of this package. Commands of both are run by `remap`.
"""

from __future__ import annotations
