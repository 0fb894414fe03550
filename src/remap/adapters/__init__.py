"""Ways into engines that remap does not own. Nothing here is imported unless asked for by name."""
