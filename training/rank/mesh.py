"""Where a rank stands where more than the rows of a batch is shared among the ranks."""

from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.plan import Plan
from training.rank.group import Ranks

AXES = ("data", "pipeline", "tensor")
"""From the outermost: those that exchange most are neighbours, and so on one host."""


def make_mesh(plan: Plan) -> DeviceMesh:
    """All ranks of a run, (data, pipeline, tensor). All ranks call it."""
    return _make_mesh(plan.device, dict(zip(AXES, (plan.data, plan.pipeline, plan.tensor), strict=True)))


def make_expert_mesh(plan: Plan) -> DeviceMesh:
    """The data-parallel ranks, among which the experts are split: (copies of each expert, parts of the experts)."""
    return _make_mesh(plan.device, {"copies": plan.data // plan.expert, "expert": plan.expert, "tensor": 1})


def find_data_group(mesh: DeviceMesh) -> Ranks:
    """The ranks that stand where this one does in every other copy of the model."""
    return Ranks(mesh["data"].get_group())


def _make_mesh(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
