"""The native extension, or None where it was not built or TIERZERO_NO_NATIVE=1 asks to do without it."""

from __future__ import annotations

import os
from types import ModuleType

_native: ModuleType | None = None
if os.environ.get("TIERZERO_NO_NATIVE", "") in ("", "0"):
    try:
        from tierzero import _native
    except ImportError:
        _native = None

NATIVE: ModuleType | None = _native
