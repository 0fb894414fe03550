"""`bench.lab real`: the engine on this machine under each policy, in the same memory, on the same requests."""
