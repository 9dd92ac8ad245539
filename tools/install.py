"""`pip install` for the Makefile, saying what goes on in a few lines: what is fetched, compiled and unpacked, and that
it still goes on. What pip says itself is shown when it fails.

    python tools/install.py PIP-ARGUMENTS...
"""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

EVERY = 20.0  # seconds without a line after which one says that it still goes on
_LARGE = re.compile(r"\s*(Downloading|Using cached) (?:\S*/)?(\S+?)-\d\S*\.whl(?:\.metadata)? \(([\d.]+ [MG]B)\)")
_UNPACKED = re.compile(r"Installing collected packages: (.*)")
_BUILD = re.compile(r"\s*Building wheel for (\S+) .*started")
_DONE = re.compile(r"Successfully installed (.*)")


def condensed(line: str) -> str | None:
    """What a person is to see of a line of pip's, None for nothing."""
    if (found := _LARGE.match(line)) is not None:
        return f"{'fetching' if found[1] == 'Downloading' else 'taking from the cache'} {found[2]}, {found[3]}"
    if (found := _BUILD.match(line)) is not None:
        return f"building {found[1]}: its native extension is compiled, if there is a C++ compiler"
    if (found := _UNPACKED.match(line)) is not None:
        return f"unpacking {_packages(len(found[1].split(',')))}"
    if (found := _DONE.match(line)) is not None:
        return f"installed {_packages(len(found[1].split()))}"
    return None


def _packages(count: int) -> str:
    return f"{count} package{'s' * (count != 1)}"


def told(lines: Iterator[str | None]) -> Iterator[str]:
    """What to print of pip's lines, of which None is a while without one."""
    started, now, finding = time.monotonic(), "getting ready", False
    for line in lines:
        if line is None:
            yield f"  still {now}, {time.monotonic() - started:.0f} s so far"
        elif line.startswith("Collecting") and not finding:
            finding, now = True, "looking for packages"
            yield f"  {now}"
        elif (what := condensed(line)) is not None:
            now = what
            yield f"  {what}"


def main(arguments: list[str]) -> int:
    """Run it; pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-color", *arguments]
    pip = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    arrived: queue.Queue[str | None] = queue.Queue()
    said: list[str] = []

    def listen() -> None:
        assert pip.stdout is not None
        for line in pip.stdout:
            arrived.put(line)
        arrived.put(None)

    def lines() -> Iterator[str | None]:
        while True:
            try:
                line = arrived.get(timeout=EVERY)
            except queue.Empty:
                yield None
                continue
            if line is None:
                return
            said.append(line)
            yield line

    threading.Thread(target=listen, daemon=True).start()
    try:
        for text in told(lines()):
            print(text, flush=True)
    except KeyboardInterrupt:
        pip.wait()  # it has heard of it too
        return 130
    code = pip.wait()
    if code:
        sys.stderr.write("".join(said))
        print(f"pip install {' '.join(arguments)} failed with exit code {code}, see above", file=sys.stderr)
    return code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
