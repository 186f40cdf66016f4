"""torch's own selective checkpointing under the policies of these tests: what ours is compared with.

It shows that a test of a stock defect can fail (stock fails it), and it is the yardstick for kept bytes and FLOPs.
It reads the small part of a policy that these tests use: `ops`, `do`, `call: {index: …}` and `default`.
"""

from __future__ import annotations

import functools
from collections import Counter
from fnmatch import fnmatchcase
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from tests.support.blocks import FULL, Stack

SETS = {
    "attention": ("aten._scaled_dot_product_*",),
    "matmul": ("aten.mm.*", "aten.addmm.*", "aten.bmm.*", "aten.baddbmm.*"),
    "random": ("aten.native_dropout.*", "aten.rand_like.*", "aten.bernoulli*", "aten.multinomial.*"),
    "nondeterministic": ("aten.topk.*", "aten.sort.*", "aten.multinomial.*"),
}


class Decider:
    """The policy function that torch calls after each op of a region's forward."""

    def __init__(self, policy: dict[str, Any]) -> None:
        self.policy = policy
        self.matches: Counter[str] = Counter()

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if ctx.is_recompute:
            return CheckpointPolicy.PREFER_RECOMPUTE
        decision = self.policy.get("default", "recompute")
        for rule in self.policy.get("rules", ()):
            if self._fits(rule, op):
                decision = self._decision(rule)
                break
        return CheckpointPolicy.MUST_SAVE if decision == "save" else CheckpointPolicy.PREFER_RECOMPUTE

    def _fits(self, rule: dict[str, Any], op: Any) -> bool:
        written = [rule["ops"]] if isinstance(rule["ops"], str) else rule["ops"]
        patterns = [pattern for word in written for pattern in SETS.get(word, (word, f"{word}.*"))]
        name = str(op)
        if not any(fnmatchcase(name, pattern.replace("::", ".")) for pattern in patterns):
            return False
        call = self.matches[f"{rule['id']} {name}"]
        self.matches[f"{rule['id']} {name}"] += 1
        return call in rule["call"]["index"] if "call" in rule else True

    def _decision(self, rule: dict[str, Any]) -> str:
        if rule["do"] != "alternate":
            return str(rule["do"])
        self.matches[rule["id"]] += 1
        return "save" if self.matches[rule["id"]] % 2 else "recompute"


def install_stock(model: Stack, value: Any, entry: str = "") -> Stack:
    """Put a config value on the model as torch alone would carry it out; "full" is torch's plain checkpoint."""
    del entry
    if value == FULL:
        model.context_fns = [noop_context_fn for _ in model.blocks]
    elif value != "none":
        model.context_fns = [functools.partial(_selective_contexts, value["policy"]) for _ in model.blocks]
    return model


def _selective_contexts(policy: dict[str, Any]) -> Any:
    return create_selective_checkpoint_contexts(Decider(policy))
