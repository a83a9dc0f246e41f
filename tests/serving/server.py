"""Starts a real `vllm serve` for a test."""

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openai import OpenAI

from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until

START_SECONDS = 900
# Greedy tokens of each prompt, and the top-5 logprobs of every step by token.
Answers = list[tuple[list[int], list[dict[str, float]]]]


@dataclass(frozen=True)
class Server:
    """A running server: its URL, the model's name, its log file and its first process."""

    url: str
    model: str
    log: Path
    process: subprocess.Popen[bytes]

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as response:
            return str(response.read().decode())

    def completions(self, prompts: list[list[int]], max_tokens: int) -> Answers:
        """Greedy answers to prompts of token ids."""
        answer = self.client().completions.create(
            model=self.model,
            prompt=prompts,
            max_tokens=max_tokens,
            temperature=0,
            logprobs=5,
            extra_body={"return_tokens_as_token_ids": True, "ignore_eos": True},
        )
        completions = []
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            assert choice.logprobs.top_logprobs is not None
            tokens = [int(_token_id(token)) for token in choice.logprobs.tokens]
            steps = choice.logprobs.top_logprobs
            top = [{_token_id(t): p for t, p in step.items()} for step in steps]
            completions.append((tokens, top))
        return completions


def _token_id(token: str) -> str:
    return token.removeprefix("token_id:")


@contextlib.contextmanager
def serve(
    model: Path, log: Path, *flags: str, env: dict[str, str] | None = None
) -> Iterator[Server]:
    """Start `vllm serve model`, wait until it is healthy, and stop it with all its processes."""
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"),
        "serve",
        str(model),
        *("--port", str(port), "--host", "127.0.0.1", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "8", *flags),
    ]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"} | (env or {})
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, url, log)
        yield Server(url, str(model), log, process)
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    def answers() -> bool:
        if process.poll() is not None:
            raise RuntimeError(f"exit code {process.returncode}\n{log.read_text()[-6000:]}")
        urllib.request.urlopen(f"{url}/health", timeout=PATIENCE).close()
        return True

    try:
        wait_until(answers, START_SECONDS, "healthy")
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{log.read_text()[-6000:]}") from None


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # engine core and workers, if any are left
    process.wait(PATIENCE)
