# SPDX-License-Identifier: Apache-2.0
"""The donors of memory to a tenant that runs out: in which order (`policy`), and how much of each (`supply`). Pure."""
