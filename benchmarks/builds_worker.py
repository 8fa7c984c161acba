"""Run one build for ``builds``: takes [drafter, batch, tokens, seed], answers [ns, output ids].

It uses only what builds have in common.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: str, target: str, drafter: str, prompts: str) -> None:
    """Answer commands from stdin, a JSON line each."""
    # An editable installation's hook would come before any folder.
    sys.meta_path[:] = [hook for hook in sys.meta_path if "Editable" not in type(hook).__name__
                        and "Redirecting" not in type(hook).__name__]  # fmt: skip
    sys.path.insert(0, folder)
    import outrider

    if not Path(str(outrider.__file__)).is_relative_to(folder):
        sys.exit(f"error: {folder} holds no package outrider; give the folder above it.")
    from outrider import LLM, SamplingParams
    from outrider.native import choice

    if choice.library() is None:
        sys.exit(f"error: {folder} holds no native step; copy its libraries to outrider/native.")
    options: Any = {"max_num_seqs": 8, "enable_prefix_caching": False}
    engines = {"none": LLM(target, "none", **options)}
    for name, path in (("ngram", "ngram"), ("model", drafter)):
        if path:
            engines[name] = LLM(target, path, num_speculative_tokens=4, **options)
    texts = [{"prompt_token_ids": ids} for ids in json.loads(Path(prompts).read_text())]
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, batch, tokens, seed = json.loads(line)
        chosen = [texts[(seed + i) % len(texts)] for i in range(max(batch, 2))]
        params = [
            SamplingParams(temperature=0.7, max_tokens=tokens, seed=seed + i, ignore_eos=True)
            for i in range(len(chosen))
        ]
        gc.collect()
        begin = time.perf_counter_ns()
        outputs = [
            output
            for i in range(0, len(chosen), batch)
            for output in engines[name].generate(chosen[i : i + batch], params[i : i + batch])
        ]
        took = time.perf_counter_ns() - begin
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([took, ids]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
