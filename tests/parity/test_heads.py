"""EAGLE-3 heads beside the code that defines them."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
import torch
from heads import Eagle, Reference, make_head, save_head
from loading import native_model
from transformers import AutoConfig

from outrider.models.heads import read_head
from outrider.models.native_head import NativeHead
from outrider.models.rows import Segment
from outrider.native import choice as native

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
PAGE, LENGTH = 4, 13
KINDS = {
    "safeailab": (Eagle(), "safeailab"),
    "speculators": (Eagle(state_normed=True, drafted=97), "speculators"),
    "norm before fc": (Eagle(norm_before_fc=True, output_normed=True, kv_heads=4), "speculators"),
    "a norm for each": (Eagle(fc_norm=True, layers=(-1, 0), depth=2), "speculators"),
}


def rows_of(head: Reference, tokens: torch.Tensor, hidden: torch.Tensor, more: int) -> list[torch.Tensor]:
    """Logits over the target's vocabulary behind ``tokens``, and ``more`` of own drafts."""
    count, cache, found = len(tokens) - 1, [], []
    kept = head.d2t + torch.arange(head.about.drafted)
    logits, ended = head.rows(
        tokens[1:], head.fused(hidden[:count]), torch.arange(count), cache,
        torch.ones(count, count).tril().bool(),
    )  # fmt: skip
    for step in range(more + 1):
        wide = torch.full((head.vocabulary,), -torch.inf)
        wide[kept] = logits[-1]
        found.append(wide)
        token = wide.argmax()[None]
        seen = torch.ones(1, count + step + 1).bool()
        logits, ended = head.rows(token, ended[-1:], torch.tensor([count + step]), cache, seen)
    return found


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_states_and_logits_are_those_of_the_defining_code(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    about, layout = KINDS[kind]
    config = AutoConfig.from_pretrained(tiny_llama)
    reference = make_head(about, config)
    checkpoint = save_head(reference, tmp_path / "head", layout)
    head = read_head(checkpoint)
    assert head is not None
    assert head.target_layers(config.num_hidden_layers) == about.layers
    step = native.library()
    assert step is not None
    target = native_model(step, tiny_llama, "float32", 64)
    model = NativeHead(head, target, 64, "none")
    tokens = torch.randint(config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    pages = array("i", [5, 1, 4, 2, 3, 6])
    store = target.new_store(8, PAGE)
    layers = sorted({*about.layers})
    output = target.run([Segment(tokens.tolist(), 0, pages, 0, LENGTH)], store, layers)
    hidden = torch.cat([output.hidden[layer] for layer in about.layers], -1)
    wanted = rows_of(reference, tokens, hidden, 3)

    states = torch.empty(LENGTH, model.hidden_size)
    parts = [output.hidden[layer] for layer in about.layers]
    places = array("i", range(LENGTH))
    model.fuse(parts, places, states, places)
    torch.testing.assert_close(states, reference.fused(hidden), rtol=1e-4, atol=1e-5)
    own = model.new_store(8, PAGE)
    ended = model.shape.num_layers
    # Read in two pieces, and then what it drafts itself.
    first = Segment(tokens[1:6].tolist(), 1, pages, 0, LENGTH, first=1, states=states[:5])
    model.run([first], own)
    rest = Segment(tokens[6:].tolist(), 6, pages, 1, LENGTH, first=1, states=states[5 : LENGTH - 1])
    for step, expected in enumerate(wanted):
        found = model.run([rest], own, (ended,))
        assert found.logits is not None
        kept = expected.isfinite()
        assert (found.logits[0].isfinite() == kept).all()
        torch.testing.assert_close(found.logits[0][kept], expected[kept], rtol=1e-3, atol=1e-4)
        token = int(found.logits[0].argmax())
        state = found.hidden[ended][-1:].clone()
        rest = Segment([token], LENGTH + step, pages, 1, LENGTH, first=1, states=state)
