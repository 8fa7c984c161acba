"""transformers' generate: assisted generation and prompt lookup."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from .serve import Ids, Spec, Unsupported, serve


class Transformers:
    """A model, in draft mode its assistant as well."""

    version = transformers.__version__

    def __init__(self, spec: Spec) -> None:
        if spec["dtype"] not in ("float32", "bfloat16"):
            raise Unsupported(f"transformers on CPU has no {spec['dtype']} weights of its own")
        torch.set_num_threads(spec["threads"])
        self.target = self._load(spec["target"], spec["dtype"])
        self.extra: Spec = {}
        if spec["mode"] == "draft":
            assistant = self._load(spec["drafter"], spec["dtype"])
            assistant.generation_config.num_assistant_tokens = spec["k"]
            # Always k, whatever was accepted or how sure the assistant is.
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            self.extra = {"assistant_model": assistant}
        elif spec["mode"] == "ngram":
            self.extra = {"prompt_lookup_num_tokens": spec["k"]}

    @staticmethod
    def _load(folder: str, dtype: str) -> Any:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model.generation_config.eos_token_id = None  # every call takes all its tokens
        return model.eval()

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        ids = torch.tensor(prompts)  # one: it takes no more with drafts
        sampled = options["temperature"] > 0
        given: Spec = {"temperature": options["temperature"]} if sampled else {}
        torch.manual_seed(options["seed"])
        out = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens,
            do_sample=sampled, top_k=0 if sampled else None, pad_token_id=0, **given, **self.extra,
        )  # fmt: skip
        return list(out[:, ids.shape[1] :].tolist())


if __name__ == "__main__":
    serve(Transformers)
