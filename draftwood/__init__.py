"""draftwood: train draft models for hybrid LLMs and decode with them, losslessly.

The names below are the public ones; each is imported when it is first used, so importing draftwood does nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.decode.generate import generate
    from draftwood.decode.tree import Tree
    from draftwood.models.checkpoint import load_draft
    from draftwood.models.draft import EagleDraft
    from draftwood.models.language_draft import LanguageDraft
    from draftwood.models.mamba_draft import MambaDraft
    from draftwood.models.medusa import MedusaDraft
    from draftwood.models.target import Target, load_target

__version__ = "0.1.0"

_HOMES = {
    "EagleDraft": "draftwood.models.draft",
    "LanguageDraft": "draftwood.models.language_draft",
    "MambaDraft": "draftwood.models.mamba_draft",
    "MedusaDraft": "draftwood.models.medusa",
    "Target": "draftwood.models.target",
    "Tree": "draftwood.decode.tree",
    "generate": "draftwood.decode.generate",
    "load_draft": "draftwood.models.checkpoint",
    "load_target": "draftwood.models.target",
}
__all__ = [
    "EagleDraft",
    "LanguageDraft",
    "MambaDraft",
    "MedusaDraft",
    "Target",
    "Tree",
    "__version__",
    "generate",
    "load_draft",
    "load_target",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'draftwood' has no attribute '{name}'; public names: {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
