"""Whatever ends a run, as an error that a person can act on."""

import errno
import re

import torch

from training.errors import BurnishError, CapacityError, StorageError

NO_MEMORY = re.compile(r"out of memory|can't allocate memory|Cannot allocate memory", re.IGNORECASE)


def explain(error: Exception) -> BurnishError:
    if isinstance(error, BurnishError):
        return error
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error)):
        return CapacityError(
            "the device ran out of memory; lower micro_batch_size or max_seq_len, set gradient_checkpointing to true, "
            "on a GPU activation_offloading too, or ask for fewer trained weights (adapter.type lora, a smaller r)"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"no space left on the disk of {error.filename or 'the run directory'}; free some and start again"
        )
    return BurnishError(f"unexpected {type(error).__name__}: {error}; the traceback is in log.txt")
