"""What drafters with heads on the target's hidden states have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from ..errors import ConfigError, ModelError
from ..models.heads import Head, read_head
from ..models.native import NativeTransformer
from .base import DrafterContext, DrafterSpec
from .model import checkpoint_folder


@dataclass(frozen=True)
class HeadSpec(DrafterSpec):
    """A head's checkpoint in ``folder``, of one of ``kinds``."""

    suits = "any text"
    by_folder = True
    kinds: ClassVar[tuple[str, ...]]
    folder: Path

    @classmethod
    def recognise(cls, option: str | Path) -> Self | None:
        folder = checkpoint_folder(option)
        head = read_head(folder) if folder is not None and folder.is_dir() else None
        return None if head is None or head.kind not in cls.kinds else cls(head.folder)

    def head(self) -> Head:
        """Return what the checkpoint says.

        Raises:
            ModelError: it is no head of one of the kinds.
        """
        head = read_head(self.folder)
        if head is None or head.kind not in self.kinds:
            raise ModelError(f"{self.folder} is no head for drafter {self.name!r}; give one.")
        return head


def native_target(name: str, context: DrafterContext) -> NativeTransformer:
    """Return the target, which the native step runs.

    Raises:
        ConfigError: torch runs it, or a ratio rule is in use.
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
