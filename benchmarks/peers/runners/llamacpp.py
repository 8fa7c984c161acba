"""llama.cpp through its server: a draft model, or its simplest n-gram lookup."""

import atexit
import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .serve import Ids, Spec, serve

START_SECONDS = 600.0
NGRAM = "3"  # its default of 12 tokens hardly ever matches


class LlamaCpp:
    """One server."""

    def __init__(self, spec: Spec) -> None:
        program = os.environ["PEER_SERVER"]
        done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
        version = re.search(r"^version:([^(\n]*)", done.stderr + done.stdout, re.M)
        self.version = version[1].strip() if version else "unknown"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        cache = "f32" if spec["dtype"] == "float32" else "f16"
        k, count, slots = str(spec["k"]), str(spec["threads"]), spec["parallel"]
        command = [
            program, "--model", f"{spec['target']}/model.gguf",
            "--host", "127.0.0.1", "--port", str(self.port), "--no-ui", "--parallel", str(slots),
            "--ctx-size", str((spec["context"] + 16) * slots), "--cache-ram", "0", "--fit", "off",
            "--threads", count, "--threads-batch", count, "--threads-http", str(slots + 1),
            "--cache-type-k", cache, "--cache-type-v", cache,
        ]  # fmt: skip
        if spec["mode"] == "draft":
            command += [
                "--spec-type", "draft-simple", "--model-draft", f"{spec['drafter']}/model.gguf",
                "--spec-draft-n-max", k, "--threads-draft", count, "--threads-batch-draft", count,
                "--cache-type-k-draft", cache, "--cache-type-v-draft", cache,
            ]  # fmt: skip
        elif spec["mode"] == "ngram":
            command += [
                "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", NGRAM,
                "--spec-ngram-simple-size-m", k,
            ]  # fmt: skip
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        atexit.register(server.kill)
        deadline = time.monotonic() + START_SECONDS
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if self._ask("GET", "/health", None).get("status") == "ok":
                    return
        raise RuntimeError(f"llama-server did not start (code {server.poll()})")

    def _ask(self, method: str, path: str, body: Spec | None) -> Spec:
        """One request and its JSON."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port)) as link:
            link.request(
                method, path, json.dumps(body) if body else None,
                {"Content-Type": "application/json"},
            )  # fmt: skip
            return dict(json.loads(link.getresponse().read()))

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
        reply = self._ask("POST", "/completion", body)
        if "tokens" not in reply:
            raise RuntimeError(str(reply.get("error", reply)))
        return list(reply["tokens"])


if __name__ == "__main__":
    serve(LlamaCpp)
