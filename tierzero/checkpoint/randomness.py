"""The random generators of a process, as JSON values and back."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of every random generator of the process, as JSON values."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": _encode(torch.get_rng_state()),
        "python": [version, list(words), gauss],
        "numpy": _of_numpy(np.random.get_state(legacy=False)),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_encode(one) for one in torch.cuda.get_rng_state_all()]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` gave."""
    torch.set_rng_state(_decode(state["torch"]))
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    if state["numpy"] is not None:
        kind, keys, position, has_gauss, cached = state["numpy"]
        if np.random.get_state(legacy=False)["bit_generator"] != kind:
            np.random.set_bit_generator(np.random.MT19937())  # type: ignore[attr-defined]
        np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all([_decode(one) for one in state["cuda"]])


def _of_numpy(state: Any) -> list[Any] | None:
    """numpy's global generator; None where the process has put another kind in its place, which is its own to save."""
    if state["bit_generator"] != "MT19937":
        return None
    keys = base64.b64encode(state["state"]["key"].tobytes()).decode()
    return ["MT19937", keys, int(state["state"]["pos"]), int(state["has_gauss"]), float(state["gauss"])]


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
