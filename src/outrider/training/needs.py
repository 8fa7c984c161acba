"""Forecasts the memory and disk of a training, on a module without data (torch's meta device)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.files import Files
from ..checkpoints.head_tensors import HeadTensors
from ..checkpoints.heads import MEDUSA, PARTS, Head
from .data import CONTEXT, DataOptions
from .drafter_files import config_of, module_of
from .eagle3 import Eagle3, Rows
from .forecast import Need, check, weight_bytes
from .head_files import (
    EMBEDDING,
    NewHead,
    check_head,
    described,
    eagle3_config,
    target_loader,
)
from .heads import rows_at_once
from .loop import on_cpu
from .lora import add_low_rank
from .medusa import Medusa
from .optimisers import Optimisers, trained
from .plan import Plan
from .samples import Sample, Samples, batches
from .teacher import KNOWN_IDS, ROWS, room_for_lessons

META = torch.device("meta")
COPIES = 5
"""Copies of a part's logits that are held: as logits, as log q, and as gradients."""
REMEDY = "lower --batch, or train a smaller drafter"
FEW = 16
"""Tokens of the pass that is counted and then scaled to a sample's length. They are few, since the
meta device, unlike a CPU, keeps the matrices of attention."""


def nbytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(each.nbytes for each in tensors)


def graph_bytes(module: nn.Module, forward: Callable[[], Any]) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, on the meta device."""
    own = {each.untyped_storage()._cdata for each in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage  # held, so that its address is not reused
        return tensor

    with META, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(storage.nbytes() for storage in kept.values())


class _Made(TorchDispatchMode):
    """Adds up the bytes of the storages that are made inside its context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self._held: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **(kwargs or {}))
        for tree, is_made in (((args, kwargs), False), (found, True)):
            storages = (e.untyped_storage() for e in tree_leaves(tree) if isinstance(e, Tensor))
            for storage in storages:
                if storage._cdata not in self._held:
                    self._held[storage._cdata] = storage  # keeps its address from being reused
                    self.bytes += is_made * storage.nbytes()
        return found


def made_bytes(forward: Callable[[], Any]) -> int:
    """Return the bytes of all that a forward pass makes, on the meta device.

    Most of it takes memory, even what is freed: glibc 2.36, for one, does not reuse a freed block
    for an aligned one of the same size.
    """
    made = _Made()
    with META, made:
        forward()
    return made.bytes


def state_bytes(module: nn.Module, plan: Plan) -> int:
    """Return the bytes of the optimisers' states of a module, which must be on the meta device."""
    optimisers = Optimisers(module, plan)
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimisers.step(plan.rate)
    module.zero_grad()
    states = (each for one in optimisers.state_dict() for each in one["state"].values())
    return sum(value.nbytes for state in states for value in state.values())


def lesson_bytes(sample: Sample, context: int, layers: int, width: int, ids: int) -> int:
    """Return the bytes of the lesson of a sample, see ``Lesson``."""
    tokens = sample.tokens[:context]
    said = int(sample.said[1 : len(tokens)].sum())
    return len(tokens) * (8 + 2 * layers * width) + said * (8 + 8 + 6 * min(KNOWN_IDS, ids))


def rows_like(samples: Sequence[Sample], context: int, wide: int) -> Rows:
    """Return rows of the size of those of samples' lessons, on the meta device."""
    said = [each.said[:context] for each in samples]
    begins = [0, *accumulate(len(each) - 1 for each in said)]
    firsts = [0, *accumulate(int(each[2:].sum()) for each in said)]
    with META:
        whole = torch.empty(begins[-1], dtype=torch.long)
        drafts = torch.empty(firsts[-1], dtype=torch.long)
        return Rows(whole, whole, torch.empty(begins[-1], wide), drafts, begins, firsts)


class Trainee(NamedTuple):
    """A module on the meta device, and bytes of its training.

    In memory, learning from a batch takes ``batch`` bytes, and all lessons would take ``lessons``.
    On disk, its checkpoint takes ``saved`` bytes (in memory, too, while it is written and checked),
    and the drafter that it began as takes ``begun`` if that is kept.
    """

    module: nn.Module
    batch: int
    lessons: int
    saved: int
    begun: int = 0

    def need(self, plan: Plan, target: int) -> Need:
        """Return what its training takes, with a ``target`` of that many bytes."""
        learned = nbytes(*trained(self.module).values())
        states = state_bytes(self.module, plan)
        memory = {
            "the target": target,
            "weights": nbytes(*self.module.parameters(), *self.module.buffers()),
            "gradients and averages": 3 * learned, "optimisers": states, "a batch": self.batch,
            "the result": self.saved,
        }  # fmt: skip
        state = 3 * learned + states
        return Need(memory, state + self.saved + self.begun, max(state, self.saved))


def check_training(trainee: Trainee, checkpoint: Checkpoint, plan: Plan, out: Path) -> int:
    """Print what a training in ``out`` takes; return the memory for lessons. Raises: see ``check``.

    The target is already loaded. Processes of one training share the memory for lessons, and only
    the first one prints.
    """
    state, target = PartialState(cpu=on_cpu()), weight_bytes(checkpoint)
    spare = min(trainee.lessons, room_for_lessons() // state.num_processes)
    need, silent = trainee.need(plan, target), not state.is_main_process
    return check("training", need, out, REMEDY, target, spare, silent)


def check_adapting(
    checkpoint: Checkpoint, begin: Path, head: Head | None, out: Path, plan: Plan,
    data: DataOptions, depth: int, rank: int, times: int,
) -> None:  # fmt: skip
    """Print what adapting takes, before there is data; see ``check``.

    It trains ``times`` times. Samples are assumed to have the greatest length.
    """
    context = data.context or min(CONTEXT, checkpoint.shape.context)
    said = min(data.max_tokens, context // 2)
    like = Sample(np.zeros(context, np.int32), np.arange(context) >= context - said, 0)
    samples = Samples([like] * (1 + plan.batch // said))
    if head is None:
        config = config_of(checkpoint, begin)
        trainee = drafter_trainee(checkpoint, samples, config, rank, context)
    else:
        trainee = head_trainee(head.kind, checkpoint, samples, head, plan, depth, context)
    need = trainee.need(plan, weight_bytes(checkpoint))
    check("adapting", need._replace(files=times * need.files + trainee.saved), out, REMEDY)


def head_trainee(
    kind: str, checkpoint: Checkpoint, samples: Samples, source: Head | NewHead, plan: Plan,
    depth: int, context: int, begun: bool = False,
) -> Trainee:  # fmt: skip
    """Return the forecast of a head's training, from an existing head or a new one.

    If a new one is ``begun``, its folder keeps the initial head. Raises: see ``check_head``.
    """
    if isinstance(source, Head):
        head = source
        check_head(head, checkpoint)
        entries = map(HeadTensors(head.files).entry, ("d2t", "t2d", EMBEDDING))
        fixed = sum(entry.nbytes for entry in entries if entry is not None)
    else:
        head = new_head(kind, checkpoint, source)
        fixed = 0 if kind == MEDUSA else 8 * len(source.ids) + checkpoint.shape.vocab_size
    module = empty_head(head, context)
    weights = nbytes(
        *(each for each in module.parameters() if each.requires_grad or kind != MEDUSA)
    )  # what Medusa heads borrow is not in their file
    taken = 1 if kind == MEDUSA else len(head.layers or ()) or PARTS
    drafted = head.vocab_size if head.architecture is None else head.architecture.vocab_size

    def lessons(some: Sequence[Sample]) -> int:
        return sum(lesson_bytes(s, context, taken, head.hidden_size, drafted) for s in some)

    batch = next(batches(samples.epoch(plan.seed, 0), plan.batch), samples.held_out)
    rows = rows_like(batch, context, taken * head.hidden_size)
    held = (
        (graph_bytes(module, lambda: [*module.unroll(rows, depth)]) if rows.firsts[-1] else 0)
        + logit_bytes(rows.firsts[-1], drafted)
        + lessons(batch)
        + pass_bytes(checkpoint)
    )
    everything = lessons(samples.train + samples.held_out)
    return Trainee(module, held, everything, weights // 2 + fixed, begun * (weights + fixed))


def drafter_trainee(
    checkpoint: Checkpoint, samples: Samples, config: dict[str, Any], rank: int, context: int
) -> Trainee:
    """Return the forecast of a small drafter's training: of all of it, or by LoRA of a ``rank``."""
    with META:
        module: Any = module_of(config)
        saved = nbytes(*module.parameters()) // 2
        if rank:
            add_low_rank(module, rank, rank, 0)
        few = torch.zeros(1, FEW, dtype=torch.long)
        seen = torch.ones(1, 1, FEW, FEW, dtype=torch.bool)
    made = made_bytes(lambda: module.model(few, attention_mask=seen, use_cache=False))
    ids, everything = config["vocab_size"], samples.train + samples.held_out
    longest = min(context, max(len(each.tokens) for each in everything))
    learning = made * longest // FEW + logit_bytes(longest, ids)
    held = max(learning, pass_bytes(checkpoint))  # not at once
    lessons = sum(lesson_bytes(each, context, 0, 0, ids) for each in everything)
    return Trainee(module, held, lessons, saved)


def new_head(kind: str, checkpoint: Checkpoint, new: NewHead) -> Head:
    """Return a new head without writing it."""
    a, _ = target_loader(checkpoint)
    nowhere = Path("new")
    if kind == MEDUSA:
        return Head(
            Files(nowhere), kind, a.vocab_size, a.hidden_size, None, longest=new.length,
            borrows_output=True,
        )  # fmt: skip
    return described(nowhere, eagle3_config(checkpoint, a, new))


def empty_head(head: Head, context: int) -> Eagle3 | Medusa:
    """Return a head as a module on the meta device."""
    with META:
        if head.architecture is None:
            return Medusa(head, torch.empty(head.hidden_size), 1e-6).to(META)
        table = torch.empty(head.vocab_size, head.architecture.hidden_size)
        return Eagle3(head, table, context).to(META)


def logit_bytes(rows: int, ids: int) -> int:
    """Return the bytes of the logits that are held at a time."""
    return COPIES * 4 * ids * min(rows, rows_at_once(ids))


def pass_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the logits of a target's forward pass, and of copies of them."""
    return 2 * 4 * ROWS * checkpoint.shape.vocab_size
