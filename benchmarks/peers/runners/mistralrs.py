"""mistral.rs through its Python package: plain decoding, as that drafts by MTP heads alone."""

from importlib.metadata import version
from pathlib import Path

from mistralrs import CompletionRequest, Runner, Which

from .serve import Ids, Spec, as_many, serve


class MistralRs:
    """One runner; it takes all cores that it may use, and prompts as texts, one at a time."""

    version = version("mistralrs")

    def __init__(self, spec: Spec) -> None:
        target = Path(spec["target"])
        files = Which.GGUF(
            quantized_model_id=str(target.parent), quantized_filename=target.name
        )  # fmt: skip
        self.runner = Runner(which=files, max_seqs=spec["parallel"], prefix_cache_n=0)

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        texts = [self.runner.detokenize_text(ids, skip_special_tokens=False) for ids in prompts]

        def one(text: str) -> list[int]:
            request = CompletionRequest(
                prompt=text, model="default", max_tokens=max_tokens, ignore_eos=True,
                temperature=options["temperature"], top_k=1 if not options["temperature"] else None,
            )  # fmt: skip
            reply = self.runner.send_completion_request(request)
            ids = self.runner.tokenize_text(reply.choices[0].text, False, None)
            return as_many(ids, reply.usage.completion_tokens)

        return [one(text) for text in texts]


if __name__ == "__main__":
    serve(MistralRs)
