"""What torchrun starts: of finished runs, how many bytes of quantised weights each rank holds before a step and after
it. Arguments: their directories; each rank writes `held-RANK` into them."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.plan import Plan
from training.rank.group import join_group
from training.rank.model import build_model
from training.rank.source import find_source
from training.rank.strategies import build_parallel
from training.spec import load_spec


def measure(run: Path) -> None:
    spec, told = load_spec(run / "spec.json"), json.loads((run / "plan.json").read_text())
    told.pop("memory_total_bytes")
    plan = Plan.model_validate(told, strict=False)
    group = join_group(plan.ranks, plan.device)
    model = build_model(find_source(spec.model, weights=True), plan, spec.adapter)
    whole = count(model)
    parallel = build_parallel(model, plan, group)
    before, ids = count(model), torch.arange(3, 20).unsqueeze(0)
    parallel.backward(parallel.forward(lambda: model(input_ids=ids, labels=ids).loss, last=True), last=True)
    parallel.clip()
    parallel.step(1e-3)
    (run / f"held-{group.rank}").write_text(json.dumps([whole, before, count(model)]))


def count(model: nn.Module) -> int:
    return sum(_held(weight) for weight in model.parameters() if weight.dtype == torch.uint8)


def _held(weight: nn.Parameter) -> int:
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    kept = weight.ds_tensor.numel() if hasattr(weight, "ds_tensor") else 0  # DeepSpeed's part, beside what it gathers
    return local.numel() + kept


if __name__ == "__main__":
    for name in sys.argv[1:]:
        measure(Path(name))
