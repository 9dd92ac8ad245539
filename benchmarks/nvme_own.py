"""tierzero's side of nvme.py: the engine and its memory as they come, nothing set.

A question is {"kind": "read" | "write" | "mixed", "passes": n, "memory": bytes}; the first argument is the file. The
memory is new for every question and given back after it, is asked for in sixteen requests, or in as many of 128 MiB as
it takes; each is asked for again when it has ended.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from nvme_worker import answers, serve

from tierzero.bench.stream import MOST_REQUEST, Buffers, Setting, run
from tierzero.native import NATIVE


@dataclass
class Named:
    """The file as a scratch file."""

    file: Any
    size: int

    def forget_cached(self) -> None:
        """Nothing: the file is direct, which main() has seen to."""


def main() -> None:
    """Serve."""
    out = answers()
    assert NATIVE is not None, "the native extension was not built"
    file = NATIVE.File(sys.argv[1], create=False)
    if not file.direct:
        raise SystemExit(f"{sys.argv[1]}: its file system refuses O_DIRECT, so the drive cannot be compared")
    target = Named(file, file.size())
    engine = NATIVE.Engine()
    described = engine.describe()

    def asked(memory: int) -> Setting:
        """What run() takes for requests that fill `memory`."""
        count = max(16, memory // MOST_REQUEST)
        return Setting(engine.name, memory // count // 4096 * 4096, count - 1)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if question["kind"] == "describe":
            return {key: value for key, value in described.items() if key != "drives"}
        setting, nbytes = asked(question["memory"]), question["passes"] * target.size
        how = {"request": setting.block, "engine": engine}
        buffers = Buffers([setting], request=setting.block)
        sample = run(setting, target, buffers, question["kind"], nbytes=nbytes, **how)
        engine.unregister(buffers.array)
        return {
            "nbytes": sample.moved,
            "seconds": sample.seconds,
            "cpu": sample.cpu,
            "huge": buffers.huge_share,
        }

    serve(answer, out)
    engine.close()
    file.close()


if __name__ == "__main__":
    main()
