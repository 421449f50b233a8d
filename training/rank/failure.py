"""Whatever ends a run, as an error that a person can act on."""

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from training.errors import BurnishError, CapacityError, RankDiedError, StorageError

LEFT = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed out waiting|broken pipe", re.IGNORECASE)
"""What communication libraries say where another rank is gone, or does not come."""
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for what a rank has to say about its end."""
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
    if dist.is_initialized() and (isinstance(error, dist.DistError) or LEFT.search(str(error))):
        reason = str(error).strip().splitlines()[0]
        return RankDiedError(f"another rank is gone, or did not answer in time ({reason})", code="rank_lost")
    return BurnishError(f"unexpected {type(error).__name__}: {error}; the traceback is in log.txt")


def tell_torchrun(failure: BurnishError, step: int) -> None:
    """Leave the failure of one of several ranks to torchrun, which knows those of the others."""
    about = {"message": failure.message, "timestamp": int(time.time()), "step": step, "failure": failure.as_dict()}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps(about))


def was_left(told: dict[str, Any]) -> bool:
    """Whether a rank failed because another one did."""
    failure: dict[str, Any] = told.get("failure", {})
    return failure.get("code") == "rank_lost"
