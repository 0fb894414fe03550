"""Send a burst to a cluster (`remap cluster serve`), and watch its instances merge into one pipeline and part again.

python examples/05_cluster/burst.py [URL] [REQUESTS] [TOKENS]

It needs Python alone. The URL is what `remap cluster serve` prints; the endpoints are OpenAI's.
"""

import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=600) as answer:
        return json.load(answer)


def groups(url: str) -> str:
    """Who serves together now, such as "i0 | i1" for two alone, and "i0+i1" for a pipeline of both."""
    found = ask(f"{url}/cluster")["groups"]
    return " | ".join("+".join(stage["instance"] for stage in group["stages"]) for group in found)


def watch(url: str, done: threading.Event, seen: list[str]) -> None:
    """Say it when the groups change."""
    while not done.is_set():
        now = groups(url)
        if not seen or now != seen[-1]:
            seen.append(now)
            print(f"groups: {now}", flush=True)
        done.wait(0.1)


def main(url: str = "http://127.0.0.1:8000", requests: int = 16, tokens: int = 64) -> list[str]:
    """Returns the groups that were seen, in order."""
    model = ask(f"{url}/v1/models")["data"][0]["id"]
    done, seen = threading.Event(), []
    watcher = threading.Thread(target=watch, args=(url, done, seen))
    watcher.start()
    try:
        bodies = [
            {"model": model, "prompt": f"Request {number}: " * 8, "max_tokens": tokens, "temperature": 0}
            for number in range(requests)
        ]
        begin = time.perf_counter()
        with ThreadPoolExecutor(requests) as pool:
            answers = list(pool.map(lambda body: ask(f"{url}/v1/completions", body), bodies))
        took = time.perf_counter() - begin
    finally:
        done.set()
        watcher.join()
    generated = sum(answer["usage"]["completion_tokens"] for answer in answers)
    print(f"{len(answers)} answers, {generated} tokens in {took:.1f} s")
    return seen


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:4]))
