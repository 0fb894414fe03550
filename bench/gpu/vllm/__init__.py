"""vLLM on a machine with a GPU, torch 2.11 and no network: what is carried there, and one side of each measure.

    pack.py      two parts of less than 64 MiB each: vLLM without what a dense model on Hopper does not need, its packages, remap
    unpack.sh    there: the parts into a folder
Neither the parts nor vLLM's files are ever committed. The measures are in
bench/gpu/measures (`vllm_burst`), over the engine of `bench.lab vllm`.
"""
