# SPDX-License-Identifier: Apache-2.0
"""Adapters for engines that remap does not own. A module of this package is imported only by its name."""
