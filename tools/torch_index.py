"""Print the pip arguments that get the CPU build of torch: an extra index where it can be reached, nothing elsewhere.

On an ordinary Linux machine the default index serves torch's CUDA build (several GB). PyTorch's own index has the CPU
build as version `X+cpu`, which pip prefers to `X`. Behind a mirror or offline that index cannot be reached, and pip
would retry it for minutes: so ask once, briefly, and leave pip's own configuration in charge if there is no answer.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_S = 5.0


def reachable(index: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the index answers for torch within `timeout_s`."""
    request = urllib.request.Request(f"{index}/torch/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


if __name__ == "__main__":
    if reachable(CPU_INDEX):
        print(f"--extra-index-url {CPU_INDEX}")
    else:
        print(f"{CPU_INDEX} does not answer: torch comes from pip's own configuration", file=sys.stderr)
