"""`bench.lab offline`: offline batches of a model larger than its memory, by how their cache is kept, on this machine."""
