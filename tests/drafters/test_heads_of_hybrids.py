"""Heads beside targets whose layers keep states or have experts: heads have neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig

from outrider.checkpoints.heads import DFLASH
from outrider.native import choice as native
from tests.support.blocks import BlockReference
from tests.support.exactness import FAMILY_OPTIONS, HYBRIDS, MIXTURES
from tests.support.head_checks import changes_no_token
from tests.support.heads import Eagle, make_head, make_medusa, save_head

MakeCheckpoint = Callable[..., Path]
pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")


@pytest.mark.parametrize("family", [*HYBRIDS, *MIXTURES])
@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash"])
def test_their_drafts_change_no_token(
    method: str, family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    options = {"head_dim": 16, "hidden_size": 64, **FAMILY_OPTIONS[family]}
    target = make_checkpoint(tmp_path / "target", family, tokenizer=True, **options)
    config, folder = AutoConfig.from_pretrained(target), tmp_path / "head"
    if method == "medusa":
        make_medusa(folder, config.hidden_size, config.vocab_size)
    elif method == "eagle3":
        save_head(make_head(Eagle(layers=(-1, 0, 1)), config), folder)
    else:
        BlockReference(target, DFLASH).save(folder)
    changes_no_token(target, folder, method, 0.8)
