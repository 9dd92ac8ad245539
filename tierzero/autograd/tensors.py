"""The tensors in what modules take and return: nearly always a few that stand alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def tensors_in(trees: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors in nested containers, in pytree order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if type(tree) is torch.Tensor:
            found.append(tree)  # without a walk, which takes longer than all else that is done for it
        else:
            found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return found
