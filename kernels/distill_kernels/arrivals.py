"""Work that is split over programs of one launch: the last of them to arrive finishes it.

Each program stores its part, counts itself in, and the one that counts last reads all parts and adds them in their own
order, so that who came last changes no bit. Parts are read with `cache_modifier=".cg"`, from L2, which all
multiprocessors share: L1 may hold lines of an earlier launch at the same addresses.
"""

from __future__ import annotations

from distill_kernels.launch import tl, triton


@triton.jit
def last_to_arrive(counters_ptr, place, PROGRAMS: tl.constexpr):
    """Count this program in, after its part is stored; return whether it is the last of PROGRAMS.

    counters: int32, zero before the launch and after it; `place`: which of them these programs share.
    """
    tl.debug_barrier()  # all threads' stores before the one thread that counts
    # Release: this part is visible before the count. Acquire: the program that counts last sees every other part.
    last = tl.atomic_add(counters_ptr + place, 1, sem="acq_rel") == PROGRAMS - 1
    # All have counted, so that nobody else touches the counter in this launch; the next one finds it at 0.
    if last:
        tl.store(counters_ptr + place, 0)
    return last
