"""Outrider by the peers' protocol."""

from outrider import LLM, SamplingParams, Speculation, __version__
from outrider.base.config import EngineOptions
from outrider.errors import ConfigError

from .serve import Ids, Spec, Unsupported, serve


class Own:
    """One ``LLM``; it takes all cores that it may use."""

    version = __version__

    def __init__(self, spec: Spec) -> None:
        auto = "+".join(filter(None, ("auto", spec["drafter"])))
        drafters = {"plain": None, "ngram": "ngram", "draft": spec["drafter"], "auto": auto}
        few = spec["dtype"] if spec["dtype"].startswith("int") else None
        # Nothing depends on a drafter's bits, so its activations have 8 of them too.
        coarse = spec["drafter_dtype"].removesuffix("-a8")
        their = f"{coarse}-a8" if coarse.startswith("int") else "none"
        given: EngineOptions = {
            "num_speculative_tokens": spec["k"] or None, "max_num_seqs": spec["parallel"],
            "max_model_len": spec["context"], "enable_prefix_caching": False,
        }  # fmt: skip
        if spec["dtype"] != "gguf":
            given["dtype"] = "bfloat16" if few else spec["dtype"]
            given["quantization"], given["drafter_quantization"] = few, their
        try:
            self.llm = LLM(spec["target"], drafter=drafters[spec["mode"]], **given)
        except ConfigError as error:  # an Outrider without that option says so
            raise Unsupported(str(error)) from None

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        params = [
            SamplingParams(
                temperature=options["temperature"], seed=options["seed"] + i,
                max_tokens=max_tokens, ignore_eos=True,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        how = Speculation(num_speculative_tokens=options["k"] or None)
        outputs = self.llm.generate(list(prompts), params, speculation=how)
        return [out.outputs[0].token_ids for out in outputs]


if __name__ == "__main__":
    serve(Own)
