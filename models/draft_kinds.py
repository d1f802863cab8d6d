"""The kinds of drafts that a checkpoint can hold and a run can train, by name."""

from draftwood.models.draft import EagleDraft
from draftwood.models.draft_base import Draft
from draftwood.models.eagle3_draft import Eagle3Draft
from draftwood.models.mamba_draft import MambaDraft
from draftwood.models.medusa import MedusaDraft

KINDS: dict[str, type[Draft]] = {draft.kind: draft for draft in (EagleDraft, Eagle3Draft, MambaDraft, MedusaDraft)}
