"""Which drafter a user means, and how it is made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig
from ..errors import ConfigError, shown
from ..limits import LOOKUP, check_number
from ..models.base import Model
from ..models.families import Folder, find_folder
from .base import Drafter, NoDrafter
from .model import ModelDrafter
from .ngram import LOOKUP_WINDOW, NgramDrafter


@dataclass(frozen=True)
class DrafterSpec:
    """A drafter by name: "none", "ngram", or "model" with the ``folder`` of its checkpoint.

    ``prompt_lookup_min`` and ``prompt_lookup_max`` are ngram's shortest and longest n-gram. With
    ``auto`` nobody asked for it by name.

    Raises:
        ConfigError: a size is out of its range.
    """

    name: str
    folder: Path | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    auto: bool = False

    def __post_init__(self) -> None:
        for name, number in LOOKUP.items():
            check_number(name, getattr(self, name), number)

    def make(
        self, model: Model | None, config: EngineConfig, num_pages: int, keeps_laws: bool
    ) -> Drafter:
        """The drafter; ``model`` is its own where it has one.

        With ``keeps_laws`` its drafts carry the laws that they were drawn from.
        """
        length = config.num_speculative_tokens
        if model is not None:
            rows = config.max_num_batched_tokens
            return ModelDrafter(model, num_pages, config.page_size, rows, length, keeps_laws)
        if self.name == "ngram":
            sizes = (self.prompt_lookup_min, self.prompt_lookup_max)
            return NgramDrafter(length, *sizes, config.window_of(self.name) or LOOKUP_WINDOW)
        return NoDrafter()


def find_drafter(option: Folder | None, target: Path) -> DrafterSpec:
    """What ``LLM(drafter=...)`` means.

    "auto" takes the checkpoint in the target's sub-folder or sibling ``drafter``, else ngram; None
    and "none" draft nothing; "ngram" looks prompts up; anything else is a checkpoint.

    Raises:
        ConfigError: the option is neither a known name nor a checkpoint.
    """
    if option is None or option == "none":
        return DrafterSpec("none")
    if option == "ngram":
        return DrafterSpec("ngram")
    if option == "auto":
        for folder in (target / "drafter", target.parent / "drafter"):
            if (folder / "config.json").is_file() and folder.resolve() != target.resolve():
                return DrafterSpec("model", folder, auto=True)
        return DrafterSpec("ngram", auto=True)
    if not isinstance(option, str | Path):
        raise ConfigError(
            f"drafter is {shown(option)}; "
            "give 'auto', 'ngram', 'none', None or a checkpoint's folder."
        )
    if isinstance(option, str) and "/" not in option and not Path(option).exists():
        raise ConfigError(
            f"drafter {shown(option)} is neither a drafter (auto, ngram, none) nor a folder; "
            "give one of them."
        )
    return DrafterSpec("model", find_folder(option))
