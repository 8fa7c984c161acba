"""OpenVINO GenAI's pipeline behind OpenAI's completions: TARGET DRAFTER MODE K --port PORT.

The package has no server of its own. Folders are exported ones; MODE is plain, draft or lookup.
Requests take turns. What the pipeline has no field for is refused with 400.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai

SETTINGS = {
    "INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32",
}  # fmt: skip
CACHE_GB = 1
NGRAM = 3
SAME = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
OTHERS = (
    "prompt", "model", "max_tokens", "top_k", "seed", "stop", "logprobs", "return_token_ids",
    "structured_outputs",
)  # fmt: skip
COUNTERS = ("draft_tokens", "accepted_tokens")
Body = dict[str, Any]


class Pipeline:
    """The pipeline, and what it has drafted so far."""

    def __init__(self, target: str, drafter: str, mode: str, k: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        extra: Body = {}
        if mode == "draft":
            extra["draft_model"] = openvino_genai.draft_model(drafter, "CPU", **SETTINGS)
        elif mode == "lookup":
            extra["prompt_lookup"] = True
        self.mode, self.k = mode, k
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.pipeline = openvino_genai.LLMPipeline(
            target, "CPU", scheduler_config=scheduler, **extra, **SETTINGS
        )
        self.tokenizer = self.pipeline.get_tokenizer()

    def config(self, body: Body) -> Any:
        """Return a request's options."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body.get("max_tokens", 16)
        config.do_sample = body.get("temperature", 1.0) > 0
        for name in SAME:
            if config.do_sample and name in body:
                setattr(config, name, body[name])
        if config.do_sample and body.get("top_k", -1) > 0:
            config.top_k = body["top_k"]
        if "seed" in body:
            config.rng_seed = body["seed"]
        if stop := body.get("stop"):
            config.stop_strings = set(stop)
        if self.mode != "plain":
            config.num_assistant_tokens = self.k
        if self.mode == "lookup":
            config.max_ngram_size = NGRAM
        if form := body.get("structured_outputs"):
            asked = openvino_genai.StructuredOutputConfig()
            if "json" in form:
                asked.json_schema = json.dumps(form["json"])
            else:
                asked.regex = form["regex"]
            config.structured_output_config = asked
        return config

    def complete(self, body: Body) -> Body:
        """Return the answer to a request."""
        with self.lock:
            prompt = body["prompt"]
            if isinstance(prompt, str):
                prompt = [int(i) for i in self.tokenizer.encode(prompt).input_ids.data[0]]
            ids = np.array([prompt], np.int64)
            inputs = openvino_genai.TokenizedInputs(
                openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
            )
            result = self.pipeline.generate(inputs, self.config(body))
            if self.mode == "draft":
                metrics = result.extended_perf_metrics
                self.counts["draft_tokens"] += metrics.get_num_draft_tokens()
                self.counts["accepted_tokens"] += metrics.get_num_accepted_tokens()
            said = [int(i) for i in result.tokens[0]]
            stopped = result.finish_reasons[0] == openvino_genai.GenerationFinishReason.STOP
            choice: Body = {
                "index": 0, "text": self.tokenizer.decode(said),
                "finish_reason": "stop" if stopped else "length", "logprobs": None,
            }  # fmt: skip
            if body.get("logprobs") is not None:  # tokens, of which it tells no probabilities
                choice["logprobs"] = {"tokens": [self.tokenizer.decode([i]) for i in said]}
            if body.get("return_token_ids"):
                choice |= {"token_ids": said, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(said)}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def page(self) -> str:
        """Return the metrics under vLLM's names; the pipeline counts in its mode draft alone."""
        return "".join(
            f"vllm:spec_decode_num_{name}_total {count}\n" for name, count in self.counts.items()
        )


class Handler(BaseHTTPRequestHandler):
    """Answers requests with ``pipeline``."""

    protocol_version = "HTTP/1.1"
    pipeline: Pipeline

    def answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.path == "/metrics" and self.pipeline.mode == "draft":
            self.answer(200, self.pipeline.page().encode())
        elif self.path in ("/health", "/v1/models"):
            self.answer(200, json.dumps({"data": [{"id": "model"}]}).encode())
        else:
            self.answer(404, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        unknown = sorted(set(body) - {*SAME, *OTHERS})
        if self.path != "/v1/completions" or unknown:
            said = {"error": {"message": f"{self.path} does not take {', '.join(unknown)}"}}
            self.answer(400, json.dumps(said).encode())
            return
        try:
            self.answer(200, json.dumps(self.pipeline.complete(body)).encode())
        except Exception as error:  # the pipeline's, whose kinds are not told
            self.answer(500, json.dumps({"error": {"message": str(error)}}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


if __name__ == "__main__":
    target, drafter, mode, k, _, port = sys.argv[1:]
    Handler.pipeline = Pipeline(target, drafter, mode, int(k))
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
