"""Random bodies for the server's POST paths; each is a function of schema, seed and index."""

import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from outrider.server.protocol import PASSED

from . import values

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES_PATH = "/v1/responses", "/v1/messages"
NEEDED = {COMPLETIONS: "prompt", CHAT: "messages", RESPONSES: "input", MESSAGES_PATH: "messages"}
"""The paths that generate, and the field that each needs."""
LIMITS = {RESPONSES: "max_output_tokens"}
"""Their names of ``max_tokens``."""
OTHER_SHARE = 0.03
"""Share of bodies for other paths than these."""
NOT_FUZZED = frozenset({"/v1/speculation"})
"""Paths that change the server for everybody."""
KNOWN: tuple[str, ...] = (
    "add_special_tokens", "allowed_token_ids", "audio", "bad_words", "best_of", "cache_salt",
    "chat_template", "chat_template_kwargs", "continue_final_message", "detokenize", "documents",
    "early_stopping", "echo", "frequency_penalty", "function_call", "functions", "guided_choice",
    "guided_decoding_backend", "guided_grammar", "guided_json", "guided_regex",
    "guided_whitespace_pattern", "ignore_eos", "include_reasoning", "kv_transfer_params",
    "length_penalty", "logit_bias", "logits_processors", "logprob_token_ids", "logprobs",
    "max_completion_tokens", "max_tokens", "messages", "metadata", "min_p", "min_tokens",
    "mm_processor_kwargs", "modalities", "n", "parallel_tool_calls", "prediction", "priority",
    "prompt", "prompt_embeds", "prompt_logprobs", "reasoning_effort", "request_id",
    "response_format", "return_token_ids", "return_tokens_as_token_ids", "safety_identifier",
    "seed", "service_tier", "spaces_between_special_tokens", "store", "stream_options",
    "structural_tag", "structured_outputs", "suffix", "thinking", "tool_choice", "tools",
    "top_logprobs", "truncate_prompt_tokens", "use_beam_search", "user", "verbosity",
    "vllm_xargs", "web_search_options",
)  # fmt: skip
"""Fields of OpenAI's and vLLM's requests, sent whether or not the schema has them."""
PROMPTS: tuple[Any, ...] = (
    "def add(a, b):", "class A:\n", "x = [", "# a comment\n", "import os\n", "é 🤖", [5, 6, 7],
    ["a", "b"],
    [[5], [6, 7]], "for i in range(3):\n    print(i)\n" * 3,
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "Say a."}],
    [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
     {"role": "user", "content": "c"}],
)  # fmt: skip
INPUTS: tuple[Any, ...] = (
    "Say a.", *MESSAGES,
    [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
     {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text",
                                                                   "text": "so"}]},
     {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
     {"type": "function_call_output", "call_id": "c", "output": "3"}],
)  # fmt: skip
BLOCKS: tuple[Any, ...] = (
    *MESSAGES[:1],
    [{"role": "user", "content": "Hi"},
     {"role": "assistant", "content": [{"type": "thinking", "thinking": "so", "signature": ""},
                                       {"type": "tool_use", "id": "c", "name": "look",
                                        "input": {}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c",
                                   "content": [{"type": "text", "text": "3"}]}]}],
)  # fmt: skip
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
VALID: dict[str, tuple[Any, ...]] = {
    "temperature": (0, 0.5, 1, 2), "top_p": (0.1, 0.9, 1), "top_k": (-1, 0, 1, 20),
    "min_p": (0, 0.1), "seed": (0, 7, 2**63), "stop": ("\n", ["a", "bc"]), "n": (1, 2),
    "min_tokens": (0, 1),
    "max_tokens": (1, 2, 3), "presence_penalty": (-1, 1), "frequency_penalty": (-1, 1),
    "repetition_penalty": (0.9, 1.2), "logit_bias": ({"5": 3}, {"10": -100}),
    "bad_words": (["a"], [" b", "cd"]), "allowed_token_ids": ([5, 6, 7],),
    "prompt_logprobs": (0, 2),
    "stop_token_ids": ([5], [6, 7]), "logprobs": (0, 1), "top_logprobs": (0, 2),
    "echo": (True, False),
    "response_format": ({"type": "json_object"}, {"type": "text"}),
    "structured_outputs": ({"regex": "[ab]{1,2}"}, {"choice": ["a", "b"]}),
    "guided_json": ({"type": "integer"},), "guided_regex": ("[0-9]{1,3}",),
    "guided_choice": (["a", "b"],), "guided_grammar": ('start: "a" | "b"',),
    "speculation": ({"enabled": False}, {"drafter": "ngram"}, {"num_speculative_tokens": 1}),
    "prediction": ({"type": "content", "content": "a + b"},),
    "stream_options": ({"include_usage": True},),
    "tools": (TOOLS,), "tool_choice": ("none", "auto"), "priority": (0,), "timeout": (1, 5),
    "request_id": ("abc",), "cache_salt": ("s",), "prompt": PROMPTS, "messages": MESSAGES,
    "tokens": ([5, 6],), "token_ids": ([5, 6],), "input_ids": ([5, 6], [[5], [6, 7]]),
    "text": ("Say a.", ["a", "b"]), "sampling_params": ({"max_tokens": 2}, {"max_new_tokens": 2}),
    "max_completion_tokens": (1, 2), "chat_template_kwargs": ({},),
}  # fmt: skip
OWN_VALID: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/chat/completions/batch": {"messages": ([*MESSAGES[:2]], [MESSAGES[3]] * 3)},
    RESPONSES: {
        "input": INPUTS, "tools": ([{"type": "function", "name": "look",
                                     "parameters": PARAMETERS}],),
        "instructions": ("Be short.",), "text": ({"format": {"type": "json_object"}},),
        "previous_response_id": ("resp_x",), "include": (["message.output_text.logprobs"],),
        "truncation": ("auto", "disabled"), "metadata": ({"a": "b"},), "reasoning": ({},),
        "tool_choice": ("none", "auto", {"type": "function", "name": "look"}),
    },
    MESSAGES_PATH: {
        "messages": BLOCKS, "tools": ([{"name": "look", "input_schema": PARAMETERS}],),
        "system": ("Be short.", [{"type": "text", "text": "Be short."}]),
        "stop_sequences": (["a"],), "thinking": ({"type": "disabled"},),
        "tool_choice": ({"type": "auto"}, {"type": "none"}), "metadata": ({"user_id": "u"},),
        "output_config": ({"format": {"type": "json_schema", "schema": {"type": "integer"}}},),
    },
}  # fmt: skip
"""Values of fields that a path has in a form of its own."""
HOSTILE: dict[str, Callable[[random.Random], Any]] = {
    "guided_regex": lambda draw: draw.choice(values.REGEXES),
    "guided_grammar": lambda draw: draw.choice(values.GRAMMARS),
    "guided_json": values.schema,
    "response_format": lambda draw: {
        "type": "json_schema", "json_schema": {"name": "x", "schema": values.schema(draw)},
    },
    "structured_outputs": lambda draw: {
        "json": values.schema(draw)} if draw.random() < 0.5 else {
        "regex": draw.choice(values.REGEXES)},
    "tools": lambda draw: [{"type": "function", "function": {
        "name": values.text(draw), "parameters": values.schema(draw)}}],
}  # fmt: skip
"""Wrong values of single fields."""
BROKEN: tuple[bytes, ...] = (
    b"", b" ", b"{", b"}", b"[", b"null", b"true", b"5", b'"x"', b"[]", b"{}", b"NaN", b"\x00",
    b"\xff\xfe",
    b"[" * 500, b"[" * 20_000, b'{"a":' * 5_000, b"\xef\xbb\xbf{}", b'{"prompt": "\xff"}',
    b'{"prompt": "\xc3("}',
    b'{"prompt": "a", "prompt": 5}', b'{"prompt": "a",}', b"{'prompt': 'a'}", b'{"prompt": "a"} x',
    b'{"prompt": "\\ud800", "max_tokens": 1}', b'{"prompt": "\\u12"}', b'{"prompt": "a\nb"}',
    b'{"prompt": "a", "max_tokens": 01}', b'{"prompt": "a", "max_tokens": +1}',
    b'{"max_tokens": .5}',
    b'{"max_tokens": 0x10}', b"prompt=a&max_tokens=1", b"<xml/>",
    b'{"prompt": "a", "stop": [' + b"1," * 2_000,
    b'{"\\u0000": 1}', b'{"messages": [' + b'{"role":' * 300, b"1" * 5_000, b'"' + b"\\" * 1_000,
    "{\"prompt\": \"é\"}".encode("utf-16"), b'{"prompt": "a", "max_tokens": 1e5000}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 10_000 + b"}",
)  # fmt: skip
MARKS = (b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"-", b"9" * 20)
STREAMED, LEAVING, GONE_AT_ONCE = 0.3, 0.06, 0.02
"""Shares of bodies that ask for a stream, whose client leaves in the answer, and before it."""
LONGEST = 8 << 20
"""Bytes of a body, twice what a server takes: one that is refused early cannot take it all."""


@dataclass(frozen=True)
class Case:
    """One body: where it goes, and after how many bytes of the answer its client leaves."""

    index: int
    kind: str
    path: str
    raw: bytes
    leaves: int | None = None


class Bodies:
    """The bodies for a server with a published schema (``/openapi.json``), by a seed."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self.seed = seed
        self.schemas: dict[str, Any] = document.get("components", {}).get("schemas", {})
        self.paths = {
            path: self.resolved(content["application/json"]["schema"])
            for path, methods in sorted(document["paths"].items())
            if (content := methods.get("post", {}).get("requestBody", {}).get("content"))
            and path not in NOT_FUZZED
        }
        self.main = [path for path in NEEDED if path in self.paths]
        self.others = [path for path in self.paths if path not in NEEDED]
        self.kinds: dict[str, tuple[int, Callable[[random.Random, str], bytes]]] = {
            "valid": (22, lambda draw, path: self.spoilt(draw, path, 0)),
            "one field": (38, lambda draw, path: self.spoilt(draw, path, 1)),
            "two fields": (14, lambda draw, path: self.spoilt(draw, path, 2)),
            "many fields": (4, lambda draw, path: self.spoilt(draw, path, draw.randint(3, 12))),
            "inner value": (12, self.inner),
            "bytes": (7, self.bitten),
            "broken": (3, lambda draw, path: draw.choice(BROKEN)),
        }
        """By name: the weight, and what makes the body."""

    def resolved(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema, or the one that it refers to."""
        name = schema.get("$ref", "").rpartition("/")[2]
        return dict(self.schemas.get(name, {})) if name else schema

    def fields(self, path: str) -> list[str]:
        """The names of a body's fields: the schema's, and all that are known besides."""
        published = self.paths[path].get("properties", {})
        any_of_both = (COMPLETIONS, CHAT, "/invocations")
        known = KNOWN if path in any_of_both else PASSED if path in NEEDED else ()
        return sorted({*published, *known})

    def case(self, index: int) -> Case:
        """The body of that index, the same for the same schema and seed."""
        draw = random.Random(f"{self.seed}/{index}")
        paths = self.others if self.others and draw.random() < OTHER_SHARE else self.main
        path = draw.choice(paths)
        (kind,) = draw.choices(list(self.kinds), [weight for weight, _ in self.kinds.values()])
        raw = self.kinds[kind][1](draw, path)[:LONGEST]
        fates = [None, draw.randint(1, 2000), 0]
        (leaves,) = draw.choices(fates, (1 - LEAVING - GONE_AT_ONCE, LEAVING, GONE_AT_ONCE))
        return Case(index, kind, path, raw, leaves)

    def valid(self, draw: random.Random, path: str) -> dict[str, Any]:
        """A small body that is right, or nearly: options may contradict each other."""
        if path not in NEEDED:
            required = self.paths[path].get("required", ["prompt"])
            return {name: self.right(draw, path, name) for name in required}
        needed, limit = NEEDED[path], LIMITS.get(path, "max_tokens")
        body = {needed: self.right(draw, path, needed), limit: draw.randint(1, 3)}
        for name in draw.sample(self.fields(path), draw.randint(0, 4)):
            known = name in VALID or name in OWN_VALID.get(path, {})
            if name not in ("prompt", "messages", "input", limit) and known:
                body[name] = self.right(draw, path, name)
        if draw.random() < STREAMED:
            body["stream"] = True
        return body

    def right(self, draw: random.Random, path: str, name: str) -> Any:
        """A value that the field may have."""
        if name == "logprobs" and path == CHAT:
            return True
        if name in OWN_VALID.get(path, {}):
            return draw.choice(OWN_VALID[path][name])
        if name in VALID:
            return draw.choice(VALID[name])
        return self.shaped(draw, self.paths[path].get("properties", {}).get(name, {}))

    def wrong(self, draw: random.Random, path: str, name: str) -> Any:
        """A value that the field may not like: hostile, in its own way, or of the right shape."""
        chance = draw.random()
        if name in HOSTILE and chance < 0.5:
            return HOSTILE[name](draw)
        published = self.paths[path].get("properties", {}) if chance >= 0.75 else {}
        return self.shaped(draw, published.get(name, {}))

    def shaped(self, draw: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
        """A value of a schema's shape with hostile leaves."""
        schema = self.resolved(schema)
        if branches := schema.get("anyOf") or schema.get("oneOf"):
            return self.shaped(draw, draw.choice(branches), depth)
        if "enum" in schema and draw.random() < 0.8:
            return draw.choice(schema["enum"])
        if depth > 4 or draw.random() < 0.1:
            return values.hostile(draw)
        if inner := schema.get("properties"):
            chosen = draw.sample(sorted(inner), draw.randint(0, len(inner)))
            return {name: self.shaped(draw, inner[name], depth + 1) for name in chosen}
        if items := schema.get("items"):
            return [self.shaped(draw, items, depth + 1) for _ in range(draw.randint(0, 4))]
        if "const" in schema:
            return schema["const"]
        edges = [schema[k] for k in ("minimum", "maximum", "exclusiveMinimum") if k in schema]
        if edges and draw.random() < 0.5:
            return draw.choice(edges) + draw.choice((-1, 0, 1))
        makers: dict[str, Callable[[random.Random], Any]] = {
            "boolean": lambda draw: draw.random() < 0.5, "string": values.text,
            "integer": values.number, "number": values.number,
        }  # fmt: skip
        return makers.get(schema.get("type", ""), values.hostile)(draw)

    def spoilt(self, draw: random.Random, path: str, count: int) -> bytes:
        """A valid body with so many fields spoilt, any of them."""
        body, fields = self.valid(draw, path), self.fields(path)
        for name in draw.sample(fields, min(count, len(fields))):
            body[name] = self.wrong(draw, path, name)
        return values.dumps(body)

    def inner(self, draw: random.Random, path: str) -> bytes:
        """A valid body with one value somewhere inside replaced, removed or doubled."""
        body = self.valid(draw, path)
        key: Any = draw.choice(self.fields(path))
        body[key] = self.right(draw, path, key)
        spot: Any = deepcopy(body)  # the values of VALID are shared
        whole = spot
        while isinstance(spot[key], dict | list) and spot[key] and draw.random() < 0.85:
            spot = spot[key]
            key = draw.choice(sorted(spot) if isinstance(spot, dict) else range(len(spot)))
        action = draw.random()
        if action < 0.7:
            spot[key] = values.hostile(draw)
        elif action < 0.85:
            del spot[key]
        elif isinstance(spot, list):
            spot.extend([spot[key]] * draw.choice((1, 100, 2000)))
        else:
            spot[f"{key}\x00"] = spot[key]
        return values.dumps(whole)

    def bitten(self, draw: random.Random, path: str) -> bytes:
        """The bytes of a valid body with some of them removed, doubled or replaced."""
        raw = values.dumps(self.valid(draw, path))
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(raw) + 1)
            end = at + draw.randint(1, 12)
            middle = (b"", raw[at:end] * 2, draw.choice(MARKS), draw.randbytes(1))
            raw = raw[:at] + draw.choice(middle) + raw[end:]
        return raw
