"""Where a rank stands where more than the rows of a batch is shared among the ranks."""

from datetime import timedelta

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from training.plan import Plan
from training.rank.group import Group, Ranks, find_timeout_s

AXES = ("data", "pipeline", "tensor")
"""From the outermost: those that exchange most are neighbours, and so on one host."""


def make_mesh(plan: Plan) -> DeviceMesh:
    """All ranks of a run, (data, pipeline, tensor). All ranks call it."""
    mesh = init_device_mesh(plan.device, (plan.data, plan.pipeline, plan.tensor), mesh_dim_names=AXES)
    for axis in AXES:  # its groups do not take the timeout of the whole
        _set_pg_timeout(timedelta(seconds=find_timeout_s()), mesh.get_group(axis))
    return mesh


def find_data_group(mesh: DeviceMesh) -> Group:
    """The ranks that stand where this one does in every other copy of the model."""
    return Ranks(mesh["data"].get_group())
