"""What users may import: these names, from these modules, with their types."""

from importlib import import_module, resources

import pytest

import outrider

PUBLIC = {
    "outrider": {
        "LLM", "AsyncLLM", "SamplingParams", "StructuredOutputsParams", "Speculation",
        "RequestOutput", "CompletionOutput", "Event", "Origin", "OutriderError", "ConfigError",
        "EndpointError", "GenerationError", "MemoryBudgetError", "ModelError", "NumericalError",
        "RequestError", "TrainingError", "WorkerError", "__version__",
    },
    "outrider.drafters.base": {"Drafter", "DrafterContext", "DrafterSpec", "Needs"},
    "outrider.base.types": {"Draft", "DraftBudget", "HiddenStates", "Scheduled", "SequenceState",
                       "Verdict"},
    "outrider.params": {"SamplingParams", "StructuredOutputsParams"},
    "outrider.ops.planning": set(),
    "outrider.ops.guard": set(),
    "outrider.audit.endpoint": set(),
    "outrider.pocket": set(),
}  # fmt: skip
"""By module; those of drafters and types are what packages of drafters are made of. A module that
has a list of its own has at least that."""


@pytest.mark.parametrize("module", PUBLIC)
def test_names_are_there(module: str) -> None:
    loaded = import_module(module)
    for name in PUBLIC[module] | set(getattr(loaded, "__all__", ())):
        assert getattr(loaded, name) is not None


def test_the_door_has_no_other_names() -> None:
    assert set(outrider.__all__) == PUBLIC["outrider"]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = outrider.Engine


def test_types_are_for_users_too() -> None:
    assert (resources.files("outrider") / "py.typed").is_file()
