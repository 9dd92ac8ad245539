"""The C++ extension: aligned memory, file I/O on native threads, and the streamed AdamW.

Arrays are NumPy arrays or torch tensors in host memory, taken without conversion or copy: another dtype, a
non-contiguous or (where it would be written) read-only array is a TypeError. Sizes and offsets are bytes unless they
say elements; what is out of range is a ValueError. I/O failures are OSError(errno, sentence, path). Every wait and
every long call releases the GIL. After a fork, the parent's engines and steppers refuse work (ValueError) in the child.
"""

from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray

__version__: str

_Path: TypeAlias = str | bytes | PathLike[str]
_Array: TypeAlias = NDArray[Any] | torch.Tensor

# (decay, w1, b2, w2, eps, step, bc2s, coef): 1 - lr*wd, 1 - beta1, beta2, 1 - beta2, eps, lr/(1 - beta1^t),
# sqrt(1 - beta2^t), clip coefficient, negative to maximize; doubles, rounded to float32 once. adamw takes a ninth, l2:
# plain Adam's weight decay, with decay 1
_Scalars: TypeAlias = tuple[float, float, float, float, float, float, float, float]

# (state_elem, numel, grad_offset_bytes or -1, grad_dtype, out_offset_bytes or -1, out_dtype, *_Scalars);
# a dtype is "f32", "bf16" or "f16". With three more, (l2, key, index): l2 as above; of moments that are not float32,
# the random key (64 bits: a hash of seed, step and parameter) and the index in the parameter of the first element
_Segment: TypeAlias = tuple[int, int, int, str, int, str, *tuple[float, ...]]

# What a state chunk is made of: (master "f32" | "split" | "none", exp_avg and exp_avg_sq "f32" | "bf16" | "u8",
# amsgrad), or None for ("f32", "f32", "f32", False). docs/kernels.md describes each. A parameter starts at a multiple
# of 64 elements, with "u8" of 256
_Format: TypeAlias = tuple[str, str, str, bool] | None

def checksum(data: _Array, word_offset: int = 0) -> tuple[int, int]:
    """(s1, s2) of uint8[n]: over little-endian 32-bit words w_i (a short tail zero padded), modulo 2**64,
    s1 = sum w_i and s2 = sum (word_offset + i + 1) * w_i. The pairs of disjoint ranges add up to the whole's;
    every range but the last is a multiple of 4 bytes, and word_offset is its first byte / 4.
    """

def l2_norms(arrays: Iterable[_Array], threads: int = 1) -> list[float]:
    """float(torch.linalg.vector_norm(a.float())) of each array (float32, bfloat16 or float16; any shape), to the last
    bit, without a temporary. `threads` share the list, not an array.
    """

def finite_norms(arrays: Iterable[_Array], threads: int = 1) -> list[tuple[float, bool]]:
    """The norms of l2_norms, each with whether every element is finite (a norm may overflow all the same)."""

def accumulate(into: _Array, grad: _Array) -> tuple[float, bool]:
    """into += grad, rounded as torch's add_ does, and the sum's norm and finiteness, in one pass. `into` is float32 or
    has the dtype of `grad`. They may not share memory.
    """

def stream_ceiling(a: _Array, b: _Array, c: _Array, grad: _Array, threads: int = 1) -> None:
    """a, b and c (float32[n]) each to half of itself plus grad: what benchmarks hold adamw against."""

def state_bytes(format: _Format, elements: int, chunk: int) -> int:
    """Bytes of a record's state: elements a multiple of 1024, chunk of 2048."""

def state_parts(format: _Format, elements: int) -> dict[str, tuple[int, int]]:
    """{part: (byte offset in the chunk, bytes)} of one chunk of `elements`, in order: "master", "exp_avg",
    "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale", "ties", "max_exp_avg_sq", "max_exp_avg_sq_scale", as far as
    there.
    """

def pack_state(
    format: _Format,
    chunk: int,
    state: _Array,
    p: _Array,
    exp_avg: _Array,
    exp_avg_sq: _Array,
    max_exp_avg_sq: _Array | None = None,
    params: _Array | None = None,
) -> None:
    """float32[n] planes of a whole record to its state, uint8[state_bytes], rounded to nearest. params: bfloat16[n]
    ("split") or float32[n] ("none"), receives the parameters.
    """

def unpack_state(
    format: _Format,
    chunk: int,
    state: _Array,
    p: _Array,
    exp_avg: _Array,
    exp_avg_sq: _Array,
    max_exp_avg_sq: _Array | None = None,
    params: _Array | None = None,
) -> None:
    """The other way: state, and with "split" or "none" params, to float32[n] planes."""

def adamw(
    p: _Array,
    exp_avg: _Array,
    exp_avg_sq: _Array,
    grad: _Array,
    out: _Array | None,
    scalars: Sequence[float],
    threads: int = 1,
    *,
    max_exp_avg_sq: _Array | None = None,
) -> None:
    """One step of one whole parameter, bit for bit torch.optim.AdamW or Adam (fused=True) on a CPU with AVX2; with
    max_exp_avg_sq, float32[n], of amsgrad.

    p, exp_avg, exp_avg_sq: float32[n], updated in place. grad: float32|bfloat16|float16[n]; float(grad) * coef is
    rounded to float32. out: float32|bfloat16|float16[n] or None, receives p rounded to nearest even. No two may share
    memory.
    """

def cpu_features() -> dict[str, bool]:
    """What this processor can do, by name ("avx2", "fma", ...)."""

def set_slice(seconds: float) -> bool:
    """Give the calling thread time slices of `seconds`, 0.0001 to 0.1: a thread of shorter ones takes its core as soon
    as it wakes. False where the kernel does not know slices (before Linux 6.12) or the thread is no ordinary one.
    """

def ring(eventfd: int) -> None:
    """Add one to an eventfd without letting go of the interpreter's lock. OSError when it cannot be written to."""

def adam_isa() -> str:
    """The kernels in use: "avx512", "avx2", "neon" or "scalar", the best here or what TIERZERO_ISA in the environment
    says. One that cannot be used is a RuntimeWarning on import, and the best is used.
    """

class Slab:
    """Anonymous memory on a 2 MiB boundary, in huge pages where the kernel has them; untouched pages cost nothing.

    Its pages come from the NUMA node `node` while that has room; -1: from wherever they are first touched.
    """

    def __init__(self, nbytes: int, node: int = -1) -> None: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def address(self) -> int: ...
    def array(self) -> NDArray[np.uint8]:
        """uint8[nbytes], a view that keeps the slab alive."""

    def huge_bytes(self) -> int:
        """Bytes that lie in huge pages now, from /proc/self/smaps."""

def probe_uring() -> str:
    """ "" where a write and a read really went through an io_uring in this process, else why not."""

class File:
    """A regular file or block device open for reading and writing, or several of them as one striped file.

    With `direct`, O_DIRECT where a real aligned round trip beside the file works, else buffered. Of several paths,
    member i holds weights[i] stripes of `stripe` bytes (a multiple of 4096) out of every sum(weights), spread evenly;
    without weights all alike. Offsets and sizes are those of the whole.
    """

    def __init__(
        self,
        path: _Path | Sequence[_Path],
        create: bool = True,
        direct: bool = True,
        *,
        weights: Sequence[int] | None = None,
        stripe: int = 0,
    ) -> None: ...
    @property
    def path(self) -> str:
        """Of the first member."""

    @property
    def paths(self) -> list[str]: ...
    @property
    def direct(self) -> bool:
        """Whether all members do direct I/O."""

    @property
    def directs(self) -> list[bool]: ...
    @property
    def alignment(self) -> int:
        """Bytes that request offsets are multiples of: 4096 when any member is direct, else 1."""

    @property
    def closed(self) -> bool: ...
    def size(self) -> int:
        """Bytes that all members together hold from the start on."""

    def preallocate(self, nbytes: int) -> None:
        """Grows the file to nbytes with its blocks allocated; never shrinks. OSError(ENOSPC), with the path of the
        member that has no room, leaves it as it was.
        """

    def truncate(self, nbytes: int) -> None:
        """Cuts the file to nbytes, or extends it without allocating."""

    def sync(self) -> None:
        """fdatasync of every member."""

    def close(self) -> None:
        """Idempotent. Requests in flight end first, on their own reference to the descriptor."""

class Ticket:
    """A request in flight. Dropping it unread is fine; the engine holds it, and its buffers, until it is done."""

    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> None:
        """Returns when done, failed or not. TimeoutError after `timeout` seconds. Signal handlers run meanwhile."""

    def result(self) -> Any:
        """Waits, then: bytes asked for (read, write), or (state_checksum, out_checksum) of a Stepper's record, each
        (s1, s2) or None. OSError(errno, sentence with offset and length, path) when it failed.
        """

    @property
    def phases(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
        """Of a Stepper's record that is done: when its reads, its arithmetic and its writes began and ended, in
        nanoseconds of the steady clock (time.perf_counter_ns on Linux); zeros where there were none. None otherwise.
        OSError when it failed.
        """

class Engine:
    """Reads and writes in pieces of `block` bytes (a multiple of 4096), `depth` of them in flight on each drive.

    kind: "auto": io_uring where it really works and the file does direct I/O, else a pool of threads with pread and
    pwrite; "uring": OSError where it does not work; "pool". threads: of the pool, per drive; 0: `depth`, at most 16.
    deadline: seconds that the drive may leave one piece unanswered: then its request fails with OSError(ETIMEDOUT) and
    a list of what was pending, while its buffer stays alive until the drive answers; until then nothing else is written
    to that file. limit: bytes per second of each drive, reads and writes together, from 1,000,000 on; 0: none.
    """

    def __init__(
        self,
        *,
        kind: str = "auto",
        block: int = 4194304,
        depth: int = 32,
        threads: int = 0,
        deadline: float = 60.0,
        limit: int = 0,
    ) -> None: ...
    @property
    def name(self) -> str:
        """ "uring" or "pool": what direct I/O goes through."""

    @property
    def block(self) -> int: ...
    @property
    def depth(self) -> int: ...
    def describe(self) -> dict[str, Any]:
        """{"engine", "reason" why not io_uring, "block", "depth", "limit", "drives": one dict for each drive used so
        far: {"device", "engine", "reason", "direct", "fixed_files", "fixed_buffers", "flags", "node", "bytes_read",
        "bytes_written"}}.
        """

    def register(self, buffer: _Array) -> bool:
        """Makes uint8[n] known to the kernel, for cheaper requests in it; False where that cannot be. The engine keeps
        the buffer alive until `unregister` or its own end.
        """

    def unregister(self, buffer: _Array) -> None: ...
    @property
    def eventfd(self) -> int:
        """Readable when requests have completed since the last reap()."""

    def read(self, file: File, offset: int, into: _Array) -> Ticket:
        """uint8[n] from `offset`, a multiple of the file's alignment. OSError(EIO) where the file ends before."""

    def write(self, file: File, offset: int, data: _Array | bytes) -> Ticket:
        """uint8[n] to `offset`, a multiple of the file's alignment. On a direct file a short tail is zero padded."""

    def reap(self) -> list[Ticket]:
        """The tickets completed since the last call, Stepper's too, in order of completion; resets the eventfd."""

    def counters(self) -> dict[str, int]:
        """bytes_read, bytes_written (really transferred, padding included), reads, writes (requests); read_ns,
        write_ns, busy_ns: nanoseconds in which at least one read, write, or either was under way.
        """

    def close(self) -> None:
        """Waits for everything in flight, then ends the threads. Idempotent."""

class _Record(TypedDict, total=False):
    """What else Stepper.submit takes; what is not given is None, due and out_first are 0."""

    src: tuple[File, int] | None
    dst: tuple[File, int] | None
    state: _Array | None
    out: _Array | None
    out_file: tuple[File, int, int] | None
    out_first: int
    format: _Format
    params: _Array | None
    due: int

class Stepper:
    """The streamed AdamW over state records: chunks are read ahead, updated and written at the same time.

    State layout, in a file or in memory: chunks of c = min(chunk, what is left) elements, consecutive, each of the
    parts that `format` says, without one [master c][exp_avg c][exp_avg_sq c] float32. `buffers`: uint8[n],
    4096-aligned, at least 3 * (state_bytes(format, chunk, chunk) + 2 * chunk) bytes. `chunk`: elements, a multiple of
    2048. `threads` compute (the pipeline's own is one of them).
    """

    def __init__(
        self, engine: Engine, buffers: _Array, chunk: int, threads: int = 1, *, format: _Format = None
    ) -> None: ...
    @overload
    def submit(
        self,
        elements: int,
        segments: Iterable[_Segment],
        grads: _Array,
        *,
        early: Literal[True],
        **record: Unpack[_Record],
    ) -> tuple[Ticket, Ticket]: ...
    @overload
    def submit(
        self,
        elements: int,
        segments: Iterable[_Segment],
        grads: _Array,
        *,
        early: Literal[False] = False,
        **record: Unpack[_Record],
    ) -> Ticket:
        """Queues one record. Records run and complete in order; one starts while the last is written unless they share
        bytes. The order is that of `due` where it differs: one that is due sooner goes in front of what is left of the
        others, unless they share bytes.

        elements: of the record, a multiple of 1024. segments: one per parameter, state_elem a multiple of 64; without
        a gradient (-1) its state stays and its copy is still made. grads: uint8[g]. Either src and dst, (file, offset)
        of state_bytes each (12 * elements without a format), offsets multiples of 4096, disjoint or equal; or state:
        float32 or uint8 of as many bytes, updated in place. Copies go to out: uint8[m], at out_offset; or to out_file:
        (file, offset, nbytes), a record whose byte (e - out_first) * 2 is state element e's (2-byte dtypes only), every
        byte written, gaps as zeros, padded to 4096. out_first: elements, a multiple of 2048.

        format: the record's, the stepper's if None; its chunk may not be larger than the stepper's. With master "split"
        (bf16) or "none" (f32) the parameters before the step are read from params, uint8[m] laid out as out, or if None
        from out itself, which a failed record leaves partly updated. ValueError before anything starts if it does not
        fit.

        early: a second ticket too, done when all is computed, parameters in memory included, though not written yet.
        """

    @property
    def appetite(self) -> int:
        """Chunks that are kept under way at present: as few as the drive needs to be at its fastest (0 after fork)."""

    def close(self) -> None:
        """Waits for every record queued, then ends the threads. Idempotent."""
