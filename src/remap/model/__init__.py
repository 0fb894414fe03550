"""A weight's way: a torch model's tensors, as layers, as bytes, as a master copy, and back."""
