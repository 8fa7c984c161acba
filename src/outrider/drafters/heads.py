"""The common part of drafters with heads on the target's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from ..checkpoints.files import Files
from ..checkpoints.folders import find_folder
from ..checkpoints.heads import Head, read_head
from ..errors import ConfigError, ModelError, shown
from ..models.native import NativeTransformer
from .base import DrafterContext, FolderSpec


@dataclass(frozen=True)
class HeadSpec(FolderSpec):
    """A head's checkpoint in ``folder``, of one of ``kinds``."""

    suits = "any text"
    kinds: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, files: Files) -> Self | None:
        head = read_head(files)
        return super().of(files) if head is not None and head.kind in cls.kinds else None

    def head(self) -> Head:
        """Return the checkpoint's head. Raises ModelError if it is not one of the ``kinds``."""
        head = read_head(self.files)
        if head is None or head.kind not in self.kinds:
            raise ModelError(f"{self.folder} is no head for drafter {self.name!r}; give one.")
        return head


def verifier_of(head: Head) -> Files:
    """Return the target that a head names: a folder inside its own, an absolute one, or the hub's.

    Raises ModelError if it names none, one that cannot be found, or another head.
    """
    name, folder = head.verifier, head.folder
    remedy = f"give the target as the model, and drafter={str(folder)!r}."
    if name is None:
        raise ModelError(
            f"{folder} is the head of a drafter and does not say of which target; {remedy}"
        )
    said = f"{folder} names {shown(name)} as its target, which is"
    path = Path(name)
    if ".." in path.parts or name.startswith("~") or "\0" in name:
        raise ModelError(f"{said} no folder below it, absolute path or hub name; {remedy}")
    try:
        target = folder / path if (folder / path).is_dir() else find_folder(name)
        there = target.exists()
    except (ModelError, OSError):
        there = False
    if not there:
        raise ModelError(f"{said} no folder here, and the hub did not give it; {remedy}")
    files = Files(target)
    if read_head(files) is not None:
        raise ModelError(f"{said} the head of a drafter itself; {remedy}")
    return files


def native_target(name: str, context: DrafterContext) -> NativeTransformer:
    """Return the target, which the native step runs.

    Raises ConfigError if torch runs it, or a ratio rule is in use.
    """
    if not isinstance(context.model, NativeTransformer):
        raise ConfigError(
            f"drafter {name!r} needs a target that the native step runs, and torch runs this one; "
            "give drafter='suffix', or a target of a native family in float32 or bfloat16."
        )
    if context.needs_logits:
        raise ConfigError(
            f"drafter {name!r} drafts for acceptance_rule='coupled' only; leave the rule out."
        )
    return context.model
