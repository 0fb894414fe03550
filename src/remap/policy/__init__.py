# SPDX-License-Identifier: Apache-2.0
"""Pure: what is decided, from frozen views. No memory, no torch, no clock."""
