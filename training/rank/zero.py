"""ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054) by DeepSpeed: each rank keeps a part of the moments (stage 1), of
the gradients too (stage 2), and of the weights too (stage 3). Computing types, loss scale and clipping stay ours, so
that the numbers are those of one device: DeepSpeed is told of fp32 alone."""

import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import SpecError
from training.plan import Plan
from training.rank.data_parallel import DataParallel, Passes, gather_each, put_each
from training.rank.group import Group
from training.rank.loss_scale import LossScale
from training.rank.model import get_base
from training.rank.quantised import move_scales

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}
BUCKET_NUMBERS = 2**25
"""Gradients that are summed over the ranks at once, at most; stage 3 always keeps the buffer for them."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Zero(DataParallel):
    """DeepSpeed's engine is given the gradient that a window's passes have summed; when it steps and when it forgets is
    the loop's to say."""

    steps_by_engine = True

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        super().__init__(model, plan, group)
        self._engine = _start_engine(model, self._optimizer, plan)
        self._partitions = self._engine.optimizer
        self._offloads = plan.offload != "none"

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self._engine.set_gradient_accumulation_boundary(last)
        factor = self.data.ranks * (1.0 if self.loss_scale is None else self.loss_scale.factor)
        self._engine.backward(self._engine(lambda: loss * factor), scale_wrt_gas=False)

    def clip(self) -> Tensor:
        gradients = self._own_gradients()
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients)
        norm = self.group.total(self._find_norm(gradients) ** 2).sqrt()
        if self._plan.max_grad_norm:
            torch._foreach_mul_(gradients, (self._plan.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _change_weights(self) -> None:
        self._engine.step()

    def drop_gradients(self) -> None:
        self._partitions.zero_grad(set_to_none=True)
        self._partitions.averaged_gradients.clear()
        if self._offloads:
            # On the host they are kept from step to step: what a dropped window left there would be added to the next
            # one, and a weight without a gradient would take that of the step before.
            self._partitions.reset_cpu_buffers()
            self._forget_passes()
            for gradient in self._own_gradients():
                gradient.zero_()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        super().load_weights(weights)
        self._partitions.refresh_fp32_params()

    def optimizer_state(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.as_dict()}
        found: dict[str, Any] = {}
        steps = [state["step"] for state in self._optimizer.state.values() if "step" in state]
        if steps:
            self._link_moments()
            for name, weight in self._trained.items():
                # All ranks take part; the moments of one weight at a time are whole on each.
                moments = {kind: self._keep(safe_get_full_optimizer_state(weight, kind)) for kind in MOMENTS}
                found[name] = {"step": steps[0].cpu().clone(), **moments}
        return {"state": found, **scale}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale = LossScale(**state["loss_scale"])
        saved = state["state"]
        step = max((moments["step"] for moments in saved.values()), default=torch.tensor(0.0))
        for part in self._own_parts():
            at = step.to(part.device if self._optimizer.defaults["fused"] else "cpu", torch.float32, copy=True)
            self._optimizer.state[part] = {"step": at, **{kind: torch.zeros_like(part) for kind in MOMENTS}}
        self._link_moments()
        for name, weight in self._trained.items():
            for kind in MOMENTS if name in saved else ():
                self._put_moment(weight, kind, saved[name][kind].to(self.device))

    def _own_parts(self) -> list[Tensor]:
        """What the optimizer steps: this rank's part of each group of weights, laid end to end."""
        parts: list[Tensor] = self._partitions.single_partition_of_fp32_groups
        return parts

    def _own_gradients(self) -> list[Tensor]:
        if self._offloads:
            if self.device.type == "cuda":
                torch.cuda.synchronize()  # they may still be on their way to the host
            return [part.grad for part in self._own_parts() if part.grad is not None]
        return [part for parts in self._partitions.averaged_gradients.values() for part in parts]

    def _forget_passes(self) -> None:
        """The next pass is the first of its window."""
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        self._partitions.micro_step_id = INITIAL_MICRO_STEP_ID

    def _put_moment(self, weight: nn.Parameter, kind: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(weight, whole, kind)

    def _link_moments(self) -> None:
        """Tell DeepSpeed where in its flat moments those of each weight are; it does so by itself after the step of the
        first group of weights, when the others have none yet."""
        from deepspeed.utils.mixed_precision_linkage import lazy_init_hp_params_optimizer_state

        for weights, part in zip(self._partitions.bit16_groups, self._own_parts(), strict=True):
            lazy_init_hp_params_optimizer_state(weights, part, self._optimizer.state)


class ZeroWeights(Zero):
    """Stage 3. The head is whole all the time: the loss is computed from its weights by hand (head.py)."""

    def __init__(self, model: nn.Module, plan: Plan, group: Group) -> None:
        super().__init__(model, plan, group)
        head = get_base(model).get_output_embeddings()
        for weight in [] if head is None else head.parameters():
            weight.is_external_param = True  # not taken away behind the module that it is of
            self._partitions.persistent_parameters.append(weight)  # gathered again after each step
        self._gather_persistent()
        if plan.quantised_parameters:
            move_scales(model, self.device)

    def drop_gradients(self) -> None:
        # Experts keep one whenever a gradient passes by them, in a trial of the model too.
        for weight in self._trained.values():
            weight.grad = None
        super().drop_gradients()
        for bucket in self._partitions.ipg_buckets.values():
            bucket.clear_params()

    def gather_weights(self) -> dict[str, Tensor]:
        return gather_each(self.model, self.group, self._gather)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        put_each(self.model, weights, _put)
        self._partitions.refresh_fp32_params()
        self._gather_persistent()

    def _gather(self, weight: Tensor) -> Tensor:
        with _gathered(weight):
            return self._keep(weight)

    def _own_parts(self) -> list[Tensor]:
        parts: list[Tensor] = self._partitions.fp32_partitioned_groups_flat
        return parts

    def _put_moment(self, weight: nn.Parameter, kind: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_local_optimizer_state

        # Each rank's part is as long as that of any other; the last is filled up with zeros.
        numbers = weight.partition_numel()
        padded = nn.functional.pad(whole.flatten(), (0, numbers * self.data.ranks - whole.numel()))
        safe_set_local_optimizer_state(weight, padded.narrow(0, numbers * self.data.rank, numbers), kind)

    def _link_moments(self) -> None:
        """Here they are found by the place of their weight."""

    def _forget_passes(self) -> None:
        """DeepSpeed has done so."""

    def _gather_persistent(self) -> None:
        kept = self._partitions.persistent_parameters
        if kept:
            kept[0].all_gather(kept)


def _gathered(weight: Tensor, **more: Any) -> AbstractContextManager[Any]:
    """Where a weight is whole on all ranks; buffers always are."""
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters([weight] if hasattr(weight, "ds_id") else [], **more)
    return context


def _put(own: Tensor, whole: Tensor) -> None:
    with _gathered(own, modifier_rank=0):
        own.copy_(whole)


def _start_engine(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan) -> Any:
    if plan.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # read when it is imported; else it takes what it finds
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Or it compiles an operation on a CPU, behind a lock file that a process killed meanwhile leaves: all later runs
    # would wait for it without an end. gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    stage = STAGES[plan.strategy]
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": min(BUCKET_NUMBERS, plan.trained_parameters)}
    if stage == 3:
        # Modules are called in other orders than the last time, by evaluations and by preference methods: nothing is
        # fetched before it is asked for.
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
        zero["stage3_param_persistence_threshold"] = 0
    else:
        zero["compute_grad_norm"] = plan.offload != "none"  # which it cannot do without there
        # Each rank is sent its part of the sum, and not all of it.
        zero["use_multi_rank_bucket_allreduce"] = False
    if plan.offload != "none":
        on_host = {"device": "cpu", "pin_memory": plan.device == "cuda"}
        zero |= {"offload_optimizer": on_host, **({"offload_param": on_host} if plan.offload == "params" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the loop says which pass is the last
        "zero_optimization": zero,
        "gradient_clipping": 0.0,  # clipped before the step; what it clips to by itself is 1
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # which is compiled when it is first used; ours steps on the host too
        "steps_per_print": None,
    }
    given = plan.deepspeed or {}
    config |= {**given, "zero_optimization": {**zero, **given.get("zero_optimization", {})}}
    try:
        return deepspeed.initialize(model=Passes(model), optimizer=optimizer, config=config)[0]
    except (AssertionError, ValueError) as refused:  # which is how it refuses a config
        if not given:
            raise
        raise SpecError(f"deepspeed: DeepSpeed does not take it ({refused})", param="deepspeed") from None
