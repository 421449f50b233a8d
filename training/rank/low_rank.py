"""LoRA over a plain linear layer, in fewer passes over memory than peft's own: what it adds is added in place, forward
and backward, with no tensor of the layer's width made in between."""

from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


class LowRankLinear(PeftLinear):
    """peft's layer but for its forward pass, which is peft's again for all that is not plain LoRA."""

    def forward(self, x: Tensor, *arguments: Any, **more: Any) -> Tensor:
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else None
        if arguments or more or not self._is_plain(name):
            result: Tensor = super().forward(x, *arguments, **more)
            return result
        base = self.get_base_layer()
        first, second = self.lora_A[name].weight, self.lora_B[name].weight
        return _LowRank.apply(x, base.weight, base.bias, first, second, self.scaling[name])

    def _is_plain(self, name: str | None) -> bool:
        if self.disable_adapters or self.merged or name not in self.lora_A or name in self.lora_variant:
            return False
        base, dropout = self.get_base_layer(), self.lora_dropout[name]
        is_frozen = type(base) is nn.Linear and not any(weight.requires_grad for weight in base.parameters())
        is_bare = self.lora_A[name].bias is None and self.lora_B[name].bias is None
        # ZeRO stage 3 gathers a layer's weight when the layer is called, and not when it is read; a part of a weight is
        # put together with those of other ranks there.
        is_whole = not hasattr(base.weight, "ds_id") and not isinstance(base.weight, DTensor)
        return is_frozen and is_bare and is_whole and (isinstance(dropout, nn.Identity) or not self.training)


class _LowRank(torch.autograd.Function):
    """x W' + b + scale x A' B' for x (..., inputs), W (outputs, inputs), A (r, inputs), B (outputs, r)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, first: Tensor, second: Tensor, scale: float
    ) -> Tensor:
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            rows = x.reshape(-1, x.shape[-1]).to(dtype)
            out = functional.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
            low = rows @ first.to(dtype).T
            torch.addmm(out, low, second.to(dtype).T, alpha=scale, out=out)
        ctx.save_for_backward(rows, low, weight, first, second)
        ctx.scale, ctx.dtype = scale, x.dtype
        # No view as autograd knows it: whoever comes after may change the result in place.
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], out.shape[-1]])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, low, weight, first, second = ctx.saved_tensors
        dtype = gradient.dtype
        of_out = gradient.reshape(-1, gradient.shape[-1])
        of_low = (of_out @ second.to(dtype)).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = of_out @ weight.to(dtype)
            torch.addmm(of_x, of_low, first.to(dtype), out=of_x)
            of_x = of_x.view(*gradient.shape[:-1], -1).to(ctx.dtype)
        of_first = (of_low.T @ rows).to(first.dtype)
        of_second = (of_out.T @ low).mul_(ctx.scale).to(second.dtype)
        return of_x, None, None, of_first, of_second, None
