"""Text from the trained model."""

from __future__ import annotations

import torch
from torch import nn

from tierzero.cli.task import Task


def generate(
    task: Task, model: nn.Module, length: int, context: int, seed: int = 0, temperature: float = 0.8
) -> list[int]:
    """`length` tokens after the task's prompt (prompt included in the answer), seeing at most `context` tokens back.

    Draws from a generator of its own, so that the training's random state stays as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = task.prompt()
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for _ in range(length):
                seen = tokens[-context:]
                # padded behind to one length: a causal model does not see it, and one shape is planned for once
                padded = torch.tensor([seen + [seen[-1]] * (context - len(seen))])
                logits = task.next_logits(model, padded, len(seen) - 1).float().cpu()
                chances = torch.softmax(logits / temperature, dim=-1)
                tokens.append(int(torch.multinomial(chances, 1, generator=generator)))
    finally:
        model.train(was_training)
    return tokens
