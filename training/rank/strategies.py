"""Which class trains a plan's strategy."""

from torch import nn

from training.plan import Plan
from training.rank.group import Group
from training.rank.parallel import Parallel, SingleDevice


def build_parallel(model: nn.Module, plan: Plan, group: Group) -> Parallel:
    """The model in its place on the ranks, with its optimizer. What a run does not need is not imported."""
    if plan.tensor > 1:
        from training.rank.tensor import TensorParallel, TensorZero

        return TensorZero(model, plan, group) if plan.strategy == "zero1" else TensorParallel(model, plan, group)
    if plan.pipeline > 1:
        from training.rank.pipeline import Pipeline

        return Pipeline(model, plan, group)
    match plan.strategy:
        case "ddp" if plan.expert > 1:
            from training.rank.expert_parallel import ExpertParallel

            return ExpertParallel(model, plan, group)
        case "ddp":
            from training.rank.ddp import Ddp

            return Ddp(model, plan, group)
        case "fsdp":
            from training.rank.fsdp import Fsdp

            return Fsdp(model, plan, group)
        case "zero1" | "zero2":
            from training.rank.zero import Zero

            return Zero(model, plan, group)
        case "zero3":
            from training.rank.zero import ZeroWeights

            return ZeroWeights(model, plan, group)
        case _:
            return SingleDevice(model, plan, group)
