"""The table of drafters, and the choice among them."""

import os
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from ..base.methods import AUTO, TOGETHER, find_method
from ..base.types import Folder
from ..checkpoints.files import Files, files_of
from ..checkpoints.heads import Head
from ..checkpoints.mtp import why_none
from ..errors import ConfigError, shown
from .assistant import AssistantSpec
from .base import Drafter, DrafterContext, DrafterSpec, FolderSpec, NoSpec, checkpoint_files
from .block import BlockSpec
from .eagle import EagleSpec
from .layerskip import LayerskipSpec
from .medusa import MedusaSpec
from .model import ModelSpec
from .mtp import MtpSpec
from .ngram import NgramSpec
from .prediction import PredictionSpec
from .retokenize import RetokenizeSpec, folder_named
from .suffix import SuffixSpec

GROUP = "outrider.drafters"
"""The entry points of drafters in other packages: the name of a drafter, its ``DrafterSpec``."""
BUILT_IN: tuple[type[DrafterSpec], ...] = (
    NoSpec, NgramSpec, SuffixSpec, PredictionSpec, LayerskipSpec, EagleSpec, BlockSpec, MedusaSpec,
    MtpSpec, AssistantSpec, RetokenizeSpec, ModelSpec,
)  # fmt: skip


@cache
def known_specs() -> dict[str, type[DrafterSpec]]:
    """Return every drafter by name, in the order in which they are asked; ``model`` is last.

    Raises ConfigError if an entry point cannot be loaded, or is no ``DrafterSpec``.
    """
    specs = {spec.name: spec for spec in BUILT_IN}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            spec = entry.load()
        except Exception as error:
            raise ConfigError(
                f"drafter {entry.name!r} of {entry.value} cannot be loaded ({shown(error)}); "
                "repair or remove its package."
            ) from error
        if not (isinstance(spec, type) and issubclass(spec, DrafterSpec)):
            raise ConfigError(f"drafter {entry.name!r}: {entry.value} is no DrafterSpec.")
        specs[entry.name] = spec
    specs[ModelSpec.name] = specs.pop(ModelSpec.name)  # it takes any folder
    return specs


@dataclass(frozen=True)
class GroupSpec(DrafterSpec):
    """Several drafters: the engine chooses among them (``auto``), or merges their drafts.

    ``name`` of merged ones joins theirs by "+".
    """

    members: tuple[DrafterSpec, ...] = ()
    auto: bool = False

    @property
    def name(self) -> str:  # type: ignore[override]
        return AUTO if self.auto else TOGETHER.join(each.name for each in self.members)

    def make(self, context: DrafterContext) -> Drafter:
        raise TypeError("a group has no drafter of its own; its members have")


def sibling(target: Path) -> Path | None:
    """Return the drafter's checkpoint in the sub-folder or sibling ``drafter`` of a target."""
    for folder in (target / "drafter", target.parent / "drafter"):
        if (folder / "config.json").is_file() and folder.resolve() != target.resolve():
            return folder
    return None


def beside(target: Path | Files, kind: str) -> DrafterSpec | None:
    """Return the drafter of a kind, such as "eagle3", whose checkpoint lies beside a target.

    It is ``sibling``, the sub-folder named as the kind, or for "mtp" the target itself; else None.
    """
    spec = known_specs().get(kind)
    if spec is None or not spec.by_folder:
        return None
    files = files_of(target)
    if kind == MtpSpec.name and (own := MtpSpec.inside(files)) is not None:
        return own
    for folder in (sibling(files.folder), files.folder / kind):
        if folder is not None and (folder / "config.json").is_file():
            found = recognised(folder)
            if found.name == kind:
                return found
    return None


def find_drafter(option: Folder | DrafterSpec | None, target: Path | Files) -> DrafterSpec:
    """Return what ``LLM(drafter=option)`` means; ``methods`` has other spellings, as "EAGLE-3".

    "auto" takes the checkpoint in the target's sub-folder or sibling ``drafter``, the target's MTP
    layers, suffix, and what is joined to it by "+". "model", "eagle3" and "medusa" are that of the
    kind ``beside`` the target. None and "none" draft nothing. Names joined by "+" draft together.
    For the rest see ``recognised``.

    Raises:
        ConfigError: no drafter recognises the option.
    """
    if option is None:
        return NoSpec()
    if isinstance(option, DrafterSpec):
        return option
    files = files_of(target)
    if isinstance(option, str) and option not in known_specs() and not os.path.exists(option):
        method = find_method(option)
        option = method.ours if method and method.ours else option
    named = isinstance(option, str) and not Path(folder_named(option) or option).exists()
    parts = option.split(TOGETHER) if isinstance(option, str) and named else ()
    if AUTO in parts:
        folder, own = sibling(files.folder), MtpSpec.inside(files)
        near = () if folder is None else (recognised(folder),)
        near = (*near, *(() if own is None else (replace(own, found=True),)))
        more = [find_drafter(part, files) for part in parts if part != AUTO]
        return GroupSpec((*near, SuffixSpec(), *more), auto=True)
    if len(parts) > 1:
        members = tuple(find_drafter(part, files) for part in parts)
        if len({each.name for each in members} - {NoSpec.name}) < len(parts):
            raise ConfigError(
                f"drafter {shown(option)} joins none, or a drafter to itself; give different ones."
            )
        return GroupSpec(members)
    if isinstance(option, str) and not Path(option).exists():
        near_by = beside(files, option)
        if near_by is not None:
            return near_by
        if option == MtpSpec.name:
            raise ConfigError(
                f"drafter 'mtp': {files} has no MTP layers to draft with: {why_none(files)}; give "
                "a copy that has them, or another drafter."
            )
    if option == "" or not isinstance(option, str | Path):
        raise ConfigError(
            f"drafter is {shown(option)}; "
            "give 'auto', 'ngram', 'suffix', 'none', None or a checkpoint's folder."
        )
    return recognised(option)


def with_head(spec: DrafterSpec, head: Head) -> DrafterSpec:
    """Return the drafters of a target that a head named; ``auto`` gets the head as a member."""
    if not (isinstance(spec, GroupSpec) and spec.auto):
        return spec
    own = recognised(head.files)
    return replace(spec, members=(*(m for m in spec.members if m.name != own.name), own))


def with_loaded(spec: DrafterSpec, file: Path) -> DrafterSpec:
    """Return the drafters of an engine with one that is loaded later, from a folder or file.

    In ``auto``, and among drafters that draft together, it takes the place of their checkpoints.
    Raises ConfigError or ModelError if the file is no drafter, or only a part of one.
    """
    own = recognised(file)
    if own.folder not in (None, file):
        raise ConfigError(f"{file} is no drafter; give the folder of one, or a file that is one.")
    others = tuple(m for m in spec.members if m.folder is None and m.name != own.name)
    if not isinstance(spec, GroupSpec) or not (spec.auto or len(others) < len(spec.members)):
        return own
    return replace(spec, members=(own, *others)) if others else own


def recognised(option: str | Path | Files) -> DrafterSpec:
    """Return the first drafter of the table that recognises an option, ``model`` last.

    Raises ConfigError if none does.
    """
    files = option if isinstance(option, Files) else checkpoint_files(option)
    named = option.folder if isinstance(option, Files) else option
    for spec in known_specs().values():
        if not issubclass(spec, FolderSpec):
            drafter = spec.recognise(named)
        else:
            drafter = None if files is None else spec.of(files)
        if drafter is not None:
            return drafter
    names = sorted(name for name, spec in known_specs().items() if not spec.by_folder)
    raise ConfigError(
        f"drafter {shown(option)} is neither a drafter (auto, {', '.join(names)}) nor a folder; "
        "give one of them."
    )
