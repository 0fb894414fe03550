# SPDX-License-Identifier: Apache-2.0
"""Pure: decisions from frozen views. No memory, no torch, no clock."""
