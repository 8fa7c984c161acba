"""A hybrid's or a mixture's GGUF file here and in llama.cpp.

Plain decoding, a prompt, and MTP at an agreement; of a mixture of experts several requests at once.

The file has a published shape, random weights in Q4_0 and a table in Q8_0. Its layers add nothing
to the residual stream, so that a token follows from the last one alone, but they are computed.
(Such texts go in circles, which lookups would find: ``auto`` is left out.)
Qwen3.5's MTP layer says the same as the target for a share of all tokens. A mixture has random
weights in Q4_0. Both programs have two threads or as many as they may use, temperature 0, and one
request where no number is named. Modes run one after the other, so that ratios are as steady as the
machine; figures are medians over prompts. Run ``python -m benchmarks install llama.cpp`` first.
"""

from __future__ import annotations

import contextlib
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import gguf
import numpy as np
import torch
import typer
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.base.threads import allowed_threads
from outrider.cli.common import Out, write_json
from outrider.errors import ConfigError
from tests.support import gguf_mixtures
from tests.support.ggufs import byte_level, convert, mtp_metadata

from .common import table
from .hybrids import SHAPES
from .install import program
from .mixtures import SHAPES as MIXTURES
from .start import free_port, running

CONTEXT, PROMPT, BEHIND, SHORT = 2048, 512, 32, 256
REQUESTS = (8, 32)
START_SECONDS = 300.0
ENDS = "o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight"
"""The names of the matrices that end a sublayer end so."""
Ask = Callable[[Sequence[int], int], dict[str, Any]]
"""Answers a prompt with so many tokens."""
SAMPLED = 64
"""Tokens by which the agreement of an MTP layer is set."""


def write_file(shape: str, agreement: float, folder: Path) -> Path:
    """Write the GGUF file of a shape whose MTP layer agrees in about a share of places."""
    options = SHAPES[shape] | {"max_position_embeddings": 4096}
    family = options["model_type"]
    if family not in ("qwen3_5_text", "lfm2"):
        raise ConfigError(f"{shape} is not written as a GGUF file here; give another shape.")
    config = AutoConfig.for_model(**options)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    draws = torch.Generator().manual_seed(0)
    tensors = {
        name: _drawn(name, weight, draws)
        for name, weight in empty.state_dict().items()
        if name != "lm_head.weight"
    }
    fill = [byte_level(vocabulary=config.vocab_size)]
    if family == "qwen3_5_text":
        tensors |= mtp_layer(tensors, config, agreement, draws)
        fill.append(mtp_metadata(config.num_hidden_layers))
    source = folder / "source"
    source.mkdir()
    config.save_pretrained(source)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    del tensors

    def kind(name: str) -> Kind:
        if "embed_tokens" in name:
            return Kind.Q8_0
        return Kind.F32 if "in_proj_a" in name or "in_proj_b" in name else Kind.Q4_0

    path, _ = convert(
        source, folder / "model.gguf", kind, lambda writer: [each(writer) for each in fill],
        plain=False,
    )  # fmt: skip
    (source / "model.safetensors").unlink()
    return path


def write_mixture(shape: str, layers: int | None, folder: Path) -> Path:
    """Write the GGUF file of a mixture's shape: random codes, and norms near 1."""
    options = MIXTURES[shape] | {"max_position_embeddings": 4096}
    config = AutoConfig.for_model(**options | ({"num_hidden_layers": layers} if layers else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    family, path = config.model_type, folder / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf_mixtures.ARCHITECTURES[family], use_temp_file=True)
    gguf_mixtures.metadata(writer, config)
    byte_level(vocabulary=config.vocab_size)(writer)
    random = np.random.default_rng(0)
    for name, weight in model.state_dict().items():
        parts = {}
        if ".experts." in name:
            parts = gguf_mixtures.parts_of(name, weight, family)
        for key, part in (parts or {gguf_mixtures.file_name(name, family): weight}).items():
            if part.dim() < 2 or "gate_inp" in key or key.endswith(".bias"):
                drawn = 0.1 * random.standard_normal(part.shape, np.float32)
                writer.add_tensor(key, drawn + key.endswith("norm.weight"))
            else:
                writer.add_tensor(key, _codes(tuple(part.shape), random), raw_dtype=Kind.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _codes(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.uint8]:
    """Return random blocks of Q4_0, of numbers around 0."""
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // 32, 18), np.uint8)
    scale = np.array([shape[-1] ** -0.5 / 4], np.float16)
    blocks[..., :2] = scale.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _drawn(name: str, weight: Tensor, draws: torch.Generator) -> Tensor:
    """Return a random tensor of the shape of ``weight``; nothing for what ends a sublayer."""
    if name.endswith(ENDS):
        return torch.zeros(weight.shape, dtype=torch.bfloat16)
    made: Tensor = torch.randn(weight.shape, generator=draws)
    if "embed" not in name and weight.dim() < 2:
        made = 0.1 * made + ("norm" in name and "linear_attn" in name)
    elif "embed" not in name:
        made = made * weight.shape[-1] ** -0.5
    return made.to(torch.bfloat16)


def mtp_layer(
    tensors: dict[str, Tensor], config: Any, agreement: float, draws: torch.Generator
) -> dict[str, Tensor]:
    """Return an MTP layer, and a last norm of the target without which a token follows itself."""
    width = config.hidden_size
    attends = next(i for i, kind in enumerate(config.layer_types) if kind == "full_attention")
    own = f"model.layers.{attends}."
    layer = {n.replace(own, "mtp.layers.0."): t.clone() for n, t in tensors.items() if own in n}
    signs = (torch.randint(0, 2, (width,), generator=draws) * 2 - 2).bfloat16()  # 1 + w is 1 or -1
    head = tensors["model.embed_tokens.weight"].float()
    rows = head[:SAMPLED] / head[:SAMPLED].square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(width, width, generator=draws) * width**-0.5
    said = (rows * (1 + signs.float()) @ head.T).argmax(-1)
    low, high = 0.0, 2.0
    for _ in range(12):
        by = (low + high) / 2
        mixed = (rows + by * rows @ noise.T) * (1 + signs.float())
        share = float(((mixed @ head.T).argmax(-1) == said).float().mean())
        low, high = (by, high) if share > agreement else (low, by)
    joined = torch.eye(width) + (low * noise if agreement < 1 else 0)
    zeros = torch.zeros(width, dtype=torch.bfloat16)
    return {
        **layer, "model.norm.weight": signs, "mtp.norm.weight": signs.clone(),
        "mtp.pre_fc_norm_embedding.weight": zeros, "mtp.pre_fc_norm_hidden.weight": zeros.clone(),
        "mtp.fc.weight": torch.cat([joined, torch.zeros(width, width)], 1).bfloat16(),
    }  # fmt: skip


@contextlib.contextmanager
def theirs(file: Path, threads: int, k: int, requests: int = 1) -> Iterator[Ask]:
    """Yield what answers a prompt in llama.cpp, with ``k`` tokens by MTP, 0 for none.

    It has room for so many ``requests`` at once.
    """
    port = free_port()
    context = CONTEXT if requests == 1 else requests * SHORT
    words = [
        str(program("llama-server")), "-m", str(file), "--port", str(port), "-c", str(context),
        "-t", str(threads), "-np", str(requests),
    ]  # fmt: skip
    if k:
        words += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(k)]
    with running(words) as server:
        until = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(URLError, OSError):
                urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            if server.poll() is not None or time.monotonic() > until:
                raise ConfigError("llama-server did not start; run it to see why.")
            time.sleep(0.2)

        def ask(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
            body = {
                "prompt": [*prompt], "n_predict": tokens, "temperature": 0, "ignore_eos": True,
                "cache_prompt": False, "return_tokens": True,
            }  # fmt: skip
            request = Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
            with urlopen(request, timeout=600) as answer:
                found = json.loads(answer.read())
            took = found["timings"]
            return {
                "ids": found["tokens"][:tokens], "decode": took["predicted_per_second"],
                "prompt": took["prompt_per_second"], "drafted": took.get("draft_n", 0),
                "accepted": took.get("draft_n_accepted", 0),
            }  # fmt: skip

        yield ask


@contextlib.contextmanager
def ours(file: Path, drafter: str, k: int | None) -> Iterator[Ask]:
    """Yield what answers a prompt here."""
    llm = LLM(
        file, drafter=drafter, max_model_len=CONTEXT, num_speculative_tokens=k, max_num_seqs=1,
        enable_prefix_caching=False,
    )  # fmt: skip

    def ask(prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        (found,) = llm.generate([[*prompt]], params)
        of = found.metrics
        whole = tokens / of.tokens_per_second
        return {
            "ids": [*found.outputs[0].token_ids], "decode": (tokens - 1) / (whole - of.ttft),
            "prompt": len(prompt) / of.ttft, "drafted": of.drafted, "accepted": of.accepted,
        }  # fmt: skip

    yield ask


def at_once(file: Path, size: int, tokens: int) -> list[dict[str, Any]]:
    """Return the tokens per second of so many requests at once, prompts included, of both."""
    rng, threads = np.random.default_rng(1), allowed_threads()
    texts = [rng.integers(300, 30000, BEHIND).tolist() for _ in range(size)]
    with theirs(file, threads, 0, size) as ask, ThreadPoolExecutor(size) as pool:
        ask(texts[0], 4)
        begin = time.perf_counter()
        list(pool.map(ask, texts, [tokens] * size))
        seconds = [time.perf_counter() - begin]
    llm = LLM(
        file, drafter="none", max_model_len=SHORT, max_num_seqs=size, enable_prefix_caching=False
    )
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.generate(texts[:1], SamplingParams(temperature=0, max_tokens=4))
    begin = time.perf_counter()
    llm.generate([[*text] for text in texts], params)
    seconds.append(time.perf_counter() - begin)
    return [
        {
            "mode": f"{whose} plain, {size} requests",
            "tokens_per_s": round(size * tokens / took, 1), "prompt_tokens_per_s": "",
            "accepted": "", "same_as_plain": "",
        }
        for whose, took in zip(("llama.cpp", "outrider"), seconds, strict=True)
    ]  # fmt: skip


def measure(
    file: Path, with_mtp: bool, ks: Sequence[int], prompts: int, tokens: int
) -> list[dict[str, Any]]:
    """Return the figures of both programs, a line for each mode."""
    rng, threads = np.random.default_rng(0), allowed_threads()
    texts = [rng.integers(300, 30000, BEHIND).tolist() for _ in range(prompts)]
    longer = [rng.integers(300, 30000, PROMPT).tolist() for _ in range(prompts)]
    modes: list[tuple[str, Any]] = [
        ("llama.cpp plain", lambda: theirs(file, threads, 0)),
        ("outrider plain", lambda: ours(file, "none", None)),
    ]
    for k in ks if with_mtp else ():
        modes += [
            (f"llama.cpp mtp K={k}", lambda k=k: theirs(file, threads, k)),
            (f"outrider mtp K={k}", lambda k=k: ours(file, "mtp", k)),
        ]
    found, said = list[dict[str, Any]](), dict[str, list[list[int]]]()
    for name, opened in modes:
        gc.collect()  # of the model before
        with opened() as ask:
            ask(texts[0], 4)
            answers = [ask(text, tokens) for text in texts]
            read = [ask(text, 2) for text in longer] if name.endswith("plain") else []
        del ask  # and the model with it
        whose = name.partition(" ")[0]
        said.setdefault(whose, [each["ids"] for each in answers])
        drafted = sum(each["drafted"] for each in answers)
        found.append({
            "mode": name, "tokens_per_s": round(median(each["decode"] for each in answers), 1),
            "prompt_tokens_per_s": round(median(each["prompt"] for each in read)) if read else "",
            "accepted": round(sum(e["accepted"] for e in answers) / drafted, 2) if drafted else "",
            "same_as_plain": [each["ids"] for each in answers] == said[whose],
        })  # fmt: skip
    return found


def main(
    shape: Annotated[
        str, typer.Option(help="A shape of benchmarks hybrids or mixtures.")
    ] = "qwen3.5-0.8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Of a mixture; the shape's.")] = None,
    agreement: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of MTP, per place.")] = 0.8,
    lengths: Annotated[str, typer.Option(help="Draft lengths K, with commas.")] = "2,3,4",
    tokens: Annotated[int, typer.Option(min=8, help="Output tokens of each prompt.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each mode.")] = 4,
    out: Out = None,
) -> None:
    """Measure a hybrid's or a mixture's GGUF file here and in llama.cpp."""
    if shape not in (*SHAPES, *MIXTURES):
        known = ", ".join((*SHAPES, *MIXTURES))
        raise ConfigError(f"shape {shape!r} is not known; give one of {known}.")
    if not program("llama-server").exists():
        raise ConfigError("llama.cpp is not installed; run python -m benchmarks install llama.cpp.")
    with tempfile.TemporaryDirectory() as folder:
        if shape in MIXTURES:
            file = write_mixture(shape, layers, Path(folder))
            found = measure(file, False, (), prompts, tokens)
            for size in REQUESTS:
                gc.collect()
                found += at_once(file, size, tokens)
        else:
            file = write_file(shape, agreement, Path(folder))
            ks = [int(each) for each in lengths.split(",")]
            found = measure(file, shape.startswith("qwen"), ks, prompts, tokens)
    write_json(found, out)
    if out != "-":
        for line in table(found[0], (each.values() for each in found)):
            print(line)
