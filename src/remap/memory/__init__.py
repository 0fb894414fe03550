# SPDX-License-Identifier: Apache-2.0
"""What is so: pages, homes, rings and pools of all tenants, and every change of them."""
