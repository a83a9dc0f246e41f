"""Whether a vLLM server computes: `python3 alive.py http://localhost:8000 SECONDS`, for probes.

Exits with 1 if a request for one token is not answered within so many seconds, and meanwhile no
token came out for anybody else, and no chunk of a long prompt went into the cache. A server that is
only busy does one or the other, so load never restarts it. /health is answered by the API server,
also beside an engine that hangs.
"""

import json
import os
import sys
import time
import urllib.error
import urllib.request

SIGNS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total", "vllm:kv_cache_usage_perc")
METRICS_TIMEOUT = 10  # of a busy API server, which answers late


def computes(base: str, seconds: float) -> bool:
    """Whether the server at `base` answers, or its engine steps, within so many seconds."""
    end = time.monotonic() + seconds
    try:
        before = _signs(base)
        if _answers(base, seconds):
            return True
        # 503 comes at once where the queue is full, of requests that run or of those that hang.
        time.sleep(max(0.0, end - time.monotonic()))
        return _signs(base) != before
    except OSError:
        return False  # nobody takes the connection, or /metrics is not answered


def _answers(base: str, seconds: float) -> bool:
    """Whether a request for one token is answered, or refused for what it is."""
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{base}/v1/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            response.read()
    except urllib.error.HTTPError as e:
        return e.code < 500  # a wrong key or path is a fault of the probe, and ends no server
    except OSError:
        return False
    return True


def _signs(base: str) -> list[str]:
    """The lines of /metrics that change while the engine works."""
    with urllib.request.urlopen(f"{base}/metrics", timeout=METRICS_TIMEOUT) as response:
        lines = response.read().decode().splitlines()
    return [line for line in lines if line.startswith(SIGNS)]


if __name__ == "__main__":
    sys.exit(0 if computes(sys.argv[1], float(sys.argv[2])) else 1)
