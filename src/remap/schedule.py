# SPDX-License-Identifier: Apache-2.0
"""The schedule mathematics under the name that users import: `remap.policy.schedule`, its public part."""

from remap.policy.schedule import max_remapped, nested, one_shot_delay, period, stall, uniform

__all__ = ["max_remapped", "nested", "one_shot_delay", "period", "stall", "uniform"]
