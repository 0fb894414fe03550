"""Operators, copies and driver calls of this machine, in the form that `remap_serve.sim.fit` takes."""
