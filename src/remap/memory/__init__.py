# SPDX-License-Identifier: Apache-2.0
"""The state of memory: pages, homes, rings and pools of all tenants, and every change of them."""
