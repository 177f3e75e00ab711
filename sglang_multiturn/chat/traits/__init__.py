"""What a chat template does that surprises people, found by rendering small conversations with it.

`examine(template)` never looks at a model's name: a template is asked, and what it answers is the evidence.
"""

from __future__ import annotations

from sglang_multiturn.chat.traits.examine import examine
from sglang_multiturn.chat.traits.kinds import Severity, Trait, TraitKind

__all__ = ["Severity", "Trait", "TraitKind", "examine"]
