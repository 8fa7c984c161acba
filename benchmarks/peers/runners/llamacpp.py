"""llama.cpp through its server: a draft model, or one of its n-gram lookups."""

import atexit
import contextlib
import http.client
import json
import os
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .serve import Ids, Spec, serve

START_SECONDS = 600.0
NGRAM = "3"  # its default of 12 tokens hardly ever matches


def model_file(model: str) -> str:
    """Return the file of a model: itself, or what the conversion left in its folder."""
    return model if model.endswith(".gguf") else f"{model}/model.gguf"


class LlamaCpp:
    """One server."""

    def __init__(self, spec: Spec) -> None:
        program = os.environ["PEER_SERVER"]
        self.version = os.environ["PEER_VERSION"]  # what it says of itself names no build
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = self.command(program, spec, str(self.port))
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        atexit.register(server.kill)
        deadline = time.monotonic() + START_SECONDS
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                if self.ask("GET", "/health", None).get("status") == "ok":
                    return
        raise RuntimeError(f"llama-server did not start (code {server.poll()})")

    @classmethod
    def command(cls, program: str, spec: Spec, port: str) -> list[str]:
        """Return the server's command."""
        count, slots = str(spec["threads"]), spec["parallel"]
        return [
            program, "--model", model_file(spec["target"]), "--host", "127.0.0.1", "--port", port,
            "--parallel", str(slots), "--ctx-size", str((spec["context"] + 16) * slots),
            "--cache-ram", "0", "--threads", count, "--threads-batch", count,
            "--threads-http", str(slots + 1), *spec["arguments"], *cls.words(spec),
        ]  # fmt: skip

    @staticmethod
    def words(spec: Spec) -> list[str]:
        """Return the arguments that a fork may spell in another way."""
        k, count = str(spec["k"]), str(spec["threads"])
        cache = "f32" if spec["dtype"] == "float32" else "f16"
        words = ["--no-ui", "--fit", "off", "--cache-type-k", cache, "--cache-type-v", cache]
        if spec["mode"] == "draft":
            words += [
                "--spec-type", "draft-simple", "--model-draft", model_file(spec["drafter"]),
                "--spec-draft-n-max", k, "--threads-draft", count, "--threads-batch-draft", count,
                "--cache-type-k-draft", cache, "--cache-type-v-draft", cache,
            ]  # fmt: skip
        elif spec["mode"] == "ngram":
            # mod, which shares one table of hashes among requests, has other names for all.
            kind = spec["lookup"] or "simple"
            sizes = {"n-match": NGRAM, "n-min": "1", "n-max": k}
            if kind != "mod":
                sizes = {"size-n": NGRAM, "size-m": k}
            words += ["--spec-type", f"ngram-{kind}"]
            for name, size in sizes.items():
                words += [f"--spec-ngram-{kind}-{name}", size]
        return words

    def ask(self, method: str, path: str, body: Spec | None) -> Spec:
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
        reply = self.ask("POST", "/completion", body)
        if "tokens_predicted" not in reply:
            raise RuntimeError(str(reply.get("error", reply)))
        return self.ids(reply)

    def ids(self, reply: Spec) -> list[int]:
        """Return the ids of an output."""
        return list(reply["tokens"])


if __name__ == "__main__":
    serve(LlamaCpp)
