"""Training of the pocket pair: the target on text, the drafter on the target's distributions."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM
from transformers.models.llama import modeling_llama

from ..training.losses import Likeliest, forward_kl, total_variation
from .corpus import Corpus, windows

Loss = Callable[[torch.Tensor, int, float], torch.Tensor]
"""Of a batch [rows, length], the number of its step, and the share of the steps before it."""


@dataclass(frozen=True)
class TrainingPlan:
    """The training of one model of the pair.

    ``phases`` are (share of tokens, sequence length); every step sees ``step_tokens`` tokens.
    Learning rates warm up over 100 steps and fall linearly to a twentieth over the last 60 %.
    """

    tokens: int
    muon_rate: float
    adam_rate: float
    phases: tuple[tuple[float, int], ...]
    step_tokens: int = 4096
    weight_decay: float = 0.05

    @property
    def steps(self) -> int:
        return self.tokens // self.step_tokens

    def rate(self, step: int) -> float:
        """Return the factor on the learning rates at ``step``."""
        return min(1.0, (step + 1) / 100, 0.05 + 0.95 * ((self.steps - step) / self.steps) / 0.6)

    def length(self, step: int) -> int:
        """Return the sequence length at ``step``."""
        done = 0.0
        for share, length in self.phases:
            done += share
            if step < done * self.steps:
                return length
        return self.phases[-1][1]


def keep_heap() -> None:
    """Tell glibc to keep freed blocks: each step frees and asks again for the same gigabyte.

    Otherwise page faults take a fifth of a training step. Without glibc nothing happens.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def narrow_norms() -> None:
    """Make RMSNorm and rotary tables of transformers' Llama return bf16, as in inference.

    Autocast would otherwise keep them in fp32 and convert before each product.
    """
    rotary = modeling_llama.LlamaRotaryEmbedding.forward

    def norm(self: modeling_llama.LlamaRMSNorm, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon).bfloat16()

    def tables(
        self: torch.nn.Module, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return tuple(t.bfloat16() for t in rotary(self, x, position_ids))

    setattr(modeling_llama.LlamaRMSNorm, "forward", norm)  # noqa: B010  (mypy forbids assignment)
    setattr(modeling_llama.LlamaRotaryEmbedding, "forward", tables)  # noqa: B010


def batches(corpus: Corpus, recipe: TrainingPlan, start: int) -> Iterator[npt.NDArray[np.int64]]:
    """Yield int64 [rows, length] batches from step ``start``, the same in a resumed training."""
    step, epoch = 0, 0
    while step < recipe.steps:
        length = recipe.length(step)
        rows = recipe.step_tokens // length
        cut = windows(corpus.train, length, seed=1000 + epoch)
        for i in range(0, len(cut) - rows + 1, rows):
            if step >= recipe.steps or recipe.length(step) != length:
                break
            if step >= start:
                yield cut[i : i + rows]
            step += 1
        epoch += 1


def optimise(
    model: LlamaForCausalLM,
    loss: Loss,
    corpus: Corpus,
    recipe: TrainingPlan,
    checkpoint: Path,
    title: str,
) -> float:
    """Train ``model`` in place with Muon on matrices and AdamW on the rest.

    State is saved in ``checkpoint`` every five minutes; training resumes from there. Returns the
    hours of training, over all runs.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon = torch.optim.Muon(
        matrices, lr=recipe.muon_rate, momentum=0.95, weight_decay=recipe.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adam = torch.optim.AdamW(others, lr=recipe.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
    start, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        start, seconds = state["step"], state["seconds"]

    def save(step: int) -> None:
        state = {
            "model": model.state_dict(), "muon": muon.state_dict(), "adam": adam.state_dict(),
            "step": step, "seconds": seconds,
        }  # fmt: skip
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)

    saved = clock = time.monotonic()
    bar = tqdm(batches(corpus, recipe, start), title, recipe.steps, disable=None, initial=start)
    for step, batch in enumerate(bar, start):
        for optimiser, rate in ((muon, recipe.muon_rate), (adam, recipe.adam_rate)):
            optimiser.param_groups[0]["lr"] = rate * recipe.rate(step)
        value = loss(torch.from_numpy(np.ascontiguousarray(batch)), step, step / recipe.steps)
        value.backward()
        muon.step()
        adam.step()
        model.zero_grad()
        seconds, clock = seconds + time.monotonic() - clock, time.monotonic()
        if step % 20 == 0:
            with checkpoint.with_suffix(".log").open("a") as log:
                log.write(f"{step} {seconds:.0f} {value.item():.4f}\n")
        if clock - saved > 300:
            save(step + 1)
            saved = clock
    save(recipe.steps)
    return seconds / 3600


def text_loss(model: LlamaForCausalLM) -> Loss:
    """Return the next-token cross-entropy of ``model``, in nats a token."""

    def loss(ids: torch.Tensor, step: int, done: float) -> torch.Tensor:
        return F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    return loss


def distillation_loss(drafter: LlamaForCausalLM, target: LlamaForCausalLM) -> Loss:
    """Return the forward KL from target to drafter, later with their total variation added.

    KL learns fast everywhere; total variation is what acceptance pays for (1 - TV is the ratio
    rule's acceptance), so the last 40 % add it, at the temperatures at which the pair is judged.
    """

    def loss(ids: torch.Tensor, step: int, done: float) -> torch.Tensor:
        with torch.no_grad():
            zp = logits(target, ids).flatten(0, 1)
        zq = logits(drafter, ids).flatten(0, 1)
        value = forward_kl(Likeliest.among_all(zp.log_softmax(-1)), zq.log_softmax(-1)).mean()
        if done < 0.6:
            return value
        t = (0.7, 1.0)[step % 2]
        p = Likeliest.among_all((zp / t).log_softmax(-1))
        apart = total_variation(p, (zq / t).log_softmax(-1))
        return 0.5 * value + 2 * apart.mean()

    return loss


def logits(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return fp32 logits [rows, length, vocabulary] of ``ids`` [rows, length], computed in bf16."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        out: torch.Tensor = model(ids, use_cache=False).logits
    return out.float()
