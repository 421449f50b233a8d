"""How fast this CPU multiplies matrices: no data sheet says it of the cores that a run was given."""

import time

import psutil
import torch

BUDGET_S = 0.2


def measure_peak(dtype: torch.dtype) -> float:
    """FLOP/s: the fastest of many products of one core, times the cores in use.

    One core alone, because threads that wait for each other on a busy machine say little about what it can do; the
    fastest, because whatever else runs only makes a product slower. Two threads of one core count once.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _fastest_product(dtype) * min(threads, psutil.cpu_count(logical=False) or threads)
    finally:
        torch.set_num_threads(threads)


def _fastest_product(dtype: torch.dtype) -> float:
    """The size grows for as long as a product takes no time."""
    begun, size, best = time.perf_counter(), 256, 0.0
    while time.perf_counter() - begun < BUDGET_S:
        matrix = torch.ones(size, size, dtype=dtype)
        for _ in range(3):
            before = time.perf_counter()
            torch.mm(matrix, matrix)
            took_s = time.perf_counter() - before
            best = max(best, 2 * size**3 / took_s)
        if took_s < 1e-3 and size < 1024:
            size *= 2
    return best
