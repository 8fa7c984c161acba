"""Runs vLLM in its own environment: engines and requests from stdin, token ids to stdout.

Input is JSON: a list of {"options": of vllm.LLM, "batches": [[[prompt ids, sampling options]]]}.
Output is a line of JSON: for each engine, batch and request the ids of all its samples.
"""

import json
import os
import sys

import vllm


def main() -> None:
    answers, real = [], os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout
    for engine in json.load(sys.stdin):
        llm = vllm.LLM(**engine["options"], disable_log_stats=False)
        answers.append([])
        for batch in engine["batches"]:
            prompts = [{"prompt_token_ids": ids} for ids, _ in batch]
            params = [_params(options) for _, options in batch]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[-1].append([[list(o.token_ids) for o in each.outputs] for each in outputs])
        metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        print("drafted", metrics.get("vllm:spec_decode_num_draft_tokens"), file=sys.stderr)
        print("preempted", metrics.get("vllm:num_preemptions"), file=sys.stderr)
        print("accepted", metrics.get("vllm:spec_decode_num_accepted_tokens"), file=sys.stderr)
        del llm
    os.write(real, (json.dumps(answers) + "\n").encode())


def _params(options: dict) -> vllm.SamplingParams:
    choice = options.pop("choice", None)
    if choice is not None:
        structured = vllm.sampling_params.StructuredOutputsParams(choice=choice)
        options["structured_outputs"] = structured
    return vllm.SamplingParams(**options)


if __name__ == "__main__":
    main()
