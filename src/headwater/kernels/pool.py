"""The worker threads of a process, and which instruction set its kernels use."""

from __future__ import annotations

from headwater import _native

DEFAULT_SPIN_US = 100


class WorkerPool:
    """Threads that help the calling thread; one pool per process, called by one thread at a time.

    `num_threads` includes the caller. Workers take the CPUs that the process may run on, one each,
    and stay awake for `spin_us` after a job. With more threads than CPUs they are neither pinned
    nor kept awake. Raises ConfigError on values out of range.
    """

    def __init__(
        self, num_threads: int, *, spin_us: int = DEFAULT_SPIN_US, pin: bool = True
    ) -> None:
        self.native = _native.WorkerPool(num_threads, spin_us, pin)

    @property
    def num_threads(self) -> int:
        """Threads that take part in a job, the caller among them."""
        return self.native.num_threads

    @property
    def cpus(self) -> tuple[int, ...]:
        """The CPUs of the workers, the caller's first; empty when they are not pinned."""
        return tuple(self.native.cpus)

    def pin_caller(self) -> None:
        """Binds the calling thread to the CPU that the workers leave free for it."""
        self.native.pin_caller()


def isa() -> str:
    """The instruction set in use: the best one here, or what HEADWATER_FORCE_ISA names.

    Raises ConfigError when that names none of `supported_isas()`.
    """
    return _native.isa()


def supported_isas() -> tuple[str, ...]:
    """What this CPU and the kernels both offer, best first."""
    return tuple(_native.supported_isas())


def set_exact_activations(are_exact: bool) -> None:
    """Whether layers made from now on multiply two BF16 pieces of each activation.

    That is 16 bits instead of 8. Weights are read once for both, so that decoding, which waits for
    memory, takes hardly longer where cores have time to spare; prompts take up to twice as long.
    """
    _native.set_exact_activations(are_exact)


def self_test(name: str | None = None) -> None:
    """Compares an instruction set's kernels, by default the ones in use, with the reference.

    To be called before serving. Raises InternalError that names the kernel in disagreement.
    """
    _native.self_test(isa() if name is None else name)
