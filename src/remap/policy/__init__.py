"""Pure: what is decided, from frozen views. No memory, no torch, no clock."""
