"""Four instances of one model as processes on this machine, under a burst, by how the cluster answers it."""
