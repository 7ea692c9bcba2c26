"""A kernel that does nothing for a while."""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator,no-untyped-def"
from __future__ import annotations

import triton
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["nanoseconds"])
def rest_kernel(nanoseconds) -> None:
    """Returns when the device's clock is so much further; it may tick in microseconds."""
    began_at = globaltimer()
    while globaltimer() - began_at < nanoseconds:
        pass
