"""Mean nats of windows of ids under a model that OpenVINO runs: FOLDER WINDOWS.json OUT.json."""

import json
import sys
from pathlib import Path

import numpy as np
import openvino


def main() -> None:
    """Write a number for each window."""
    folder, windows, out = map(Path, sys.argv[1:])
    core = openvino.Core()
    hint = "f32" if folder.name == "float32" else "bf16"
    model = core.compile_model(
        core.read_model(folder / "openvino_model.xml"), "CPU", {"INFERENCE_PRECISION_HINT": hint}
    )
    named = {name for port in model.inputs for name in port.names}
    losses = []
    for window in json.loads(windows.read_text(encoding="utf-8")):
        count = len(window) - 1
        inputs = {
            "input_ids": np.array([window[:-1]], np.int64),
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request = model.create_infer_request()
        found = request.infer({name: inputs[name] for name in inputs if name in named})
        logits = found["logits"][0].astype(np.float64)
        top = logits.max(-1)
        sums = top + np.log(np.exp(logits - top[:, None]).sum(-1))
        losses.append(float((sums - logits[np.arange(count), window[1:]]).mean()))
    out.write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main()
