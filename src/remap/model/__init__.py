# SPDX-License-Identifier: Apache-2.0
"""A torch model's weights: finding its tensors, packing them into layers, master copies, and the way back."""
