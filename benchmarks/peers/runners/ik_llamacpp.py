"""ik_llama.cpp through its server, which is a fork of llama.cpp's."""

from .llamacpp import NGRAM, LlamaCpp, model_file
from .serve import Spec, as_many, serve


class IkLlamaCpp(LlamaCpp):
    """One server."""

    @staticmethod
    def words(spec: Spec) -> list[str]:
        k, count = str(spec["k"]), str(spec["threads"])
        quiet = ["--log-disable"]  # else it writes llama.log into this folder
        if spec["mode"] == "draft":
            return [
                *quiet, "--model-draft", model_file(spec["drafter"]), "--draft-max", k,
                "--threads-draft", count, "--threads-batch-draft", count,
            ]  # fmt: skip
        if spec["mode"] == "ngram":
            kind = f"ngram-{spec['lookup'] or 'simple'}"
            sizes = ("--spec-ngram-size-n", NGRAM, "--spec-ngram-size-m", k)
            return [*quiet, "--spec-type", kind, *sizes]
        return quiet

    def ids(self, reply: Spec) -> list[int]:
        """Return the ids of its text as it reads it: it does not tell those that it made."""
        body = {"content": reply["content"], "add_special": False}
        return as_many(self.ask("POST", "/tokenize", body)["tokens"], reply["tokens_predicted"])


if __name__ == "__main__":
    serve(IkLlamaCpp)
