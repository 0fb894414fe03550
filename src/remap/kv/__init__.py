# SPDX-License-Identifier: Apache-2.0
"""A block's way: which pages a tenant's KV cache has, which blocks are usable, and the tensors over them."""
