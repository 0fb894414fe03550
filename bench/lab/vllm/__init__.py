"""Stock vLLM against vLLM on remap at the same memory: compare.py starts engines (engine.py), report.py says what was found."""
