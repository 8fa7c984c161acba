"""llama.cpp through its server: a draft model, or its simplest n-gram lookup."""

from __future__ import annotations

import atexit
import http.client
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from .serve import Ids, Runner, Spec, serve

START_SECONDS = 600.0
NGRAM = "3"  # its default of 12 tokens hardly ever matches


class LlamaCpp:
    """A server; another K or thread count is another server."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.server: subprocess.Popen[bytes] | None = None
        self.port = 0
        found = subprocess.run(
            [os.environ["PEER_SERVER"], "--version"], capture_output=True, text=True, check=False
        )
        lines = [x for x in (found.stderr + found.stdout).splitlines() if x.startswith("version")]
        self.version = lines[0].partition(":")[2].partition("(")[0].strip() if lines else "unknown"
        atexit.register(self.stop)

    def stop(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()
            self.server = None

    def prepare(self, k: int, threads: int) -> None:
        self.stop()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        cache = "f32" if self.spec["dtype"] == "float32" else "f16"
        count, slots = str(threads), self.spec["parallel"]
        command = [
            os.environ["PEER_SERVER"], "--model", f"{self.spec['target']}/model.gguf",
            "--host", "127.0.0.1", "--port", str(self.port), "--no-ui", "--parallel", str(slots),
            "--ctx-size", str((self.spec["context"] + 16) * slots), "--cache-ram", "0",
            "--fit", "off",
            "--threads", count, "--threads-batch", count, "--threads-http", str(slots + 1),
            "--cache-type-k", cache, "--cache-type-v", cache,
        ]  # fmt: skip
        if self.spec["mode"] == "draft":
            drafter = f"{self.spec['drafter']}/model.gguf"
            command += [
                "--spec-type", "draft-simple", "--model-draft", drafter,
                "--spec-draft-n-max", str(k), "--threads-draft", count,
                "--threads-batch-draft", count,
                "--cache-type-k-draft", cache, "--cache-type-v-draft", cache,
            ]  # fmt: skip
        elif self.spec["mode"] == "ngram":
            command += [
                "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", NGRAM,
                "--spec-ngram-simple-size-m", str(k),
            ]  # fmt: skip
        self.server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_SECONDS
        while self.server.poll() is None and time.monotonic() < deadline:
            try:
                if self._ask("GET", "/health", None).get("status") == "ok":
                    return
            except OSError:
                pass
            time.sleep(0.1)
        raise RuntimeError(f"llama-server did not start (code {self.server.poll()})")

    def _ask(self, method: str, path: str, body: Spec | None) -> Spec:
        """One request and its JSON."""
        link = http.client.HTTPConnection("127.0.0.1", self.port)
        try:
            link.request(
                method, path, json.dumps(body) if body else None,
                {"Content-Type": "application/json"},
            )  # fmt: skip
            found: Spec = json.loads(link.getresponse().read())
        finally:
            link.close()
        return found

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        one = partial(self._complete, max_tokens, options)
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, range(len(prompts)), prompts))

    def _complete(self, max_tokens: int, options: Spec, i: int, prompt: list[int]) -> list[int]:
        """The i-th prompt's output, a request of its own."""
        greedy = options["temperature"] == 0
        body = {
            "prompt": prompt, "n_predict": max_tokens, "seed": options["seed"] + i,
            "temperature": options["temperature"], "ignore_eos": True, "cache_prompt": False,
            "return_tokens": True, "top_k": 1 if greedy else 0,
            "samplers": ["top_k" if greedy else "temperature"],
        }  # fmt: skip
        found = self._ask("POST", "/completion", body)
        if "tokens" not in found:
            raise RuntimeError(str(found.get("error", found)))
        ids: list[int] = found["tokens"]
        return ids


def make(spec: Spec) -> Runner:
    """The runner."""
    if not Path(os.environ["PEER_SERVER"]).exists():
        raise FileNotFoundError(os.environ["PEER_SERVER"])
    return LlamaCpp(spec)


if __name__ == "__main__":
    serve(make)
