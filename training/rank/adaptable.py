"""Which layers peft can adapt, so that the adapter also loads again in peft alone."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from training.errors import ModelError


def find_unfit(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Of linear layers those that have no low-rank adapter, with the reason.

    peft itself refuses some of state-space models, whose kernels pass them by. Others it takes, and looks for under
    another name when it loads the adapter: a family's renaming of old checkpoints that fits new names too.
    """
    written = {_file_name(name): torch.empty(1, 0) for name in names}
    loaded = _rename_as_loaded(model, written)
    refused = {name: "peft refuses it in this kind of model" for name in names if _is_refused(model, name)}
    lost = {name: "peft would not find its adapter in the file" for name in names if _file_name(name) not in loaded}
    return lost | refused


def require_loadable(model: Any) -> None:
    """Raises ModelError where peft would look for some of the adapter under other names than it gave."""
    from peft import get_peft_model_state_dict

    written = get_peft_model_state_dict(model, save_embedding_layers=False)
    lost = sorted(written.keys() - _rename_as_loaded(model.get_base_model(), written).keys())
    if lost:
        what = f"the adapter of this kind of model would not load: peft would not find {lost[0]}"
        raise ModelError(f'{what}; set adapter.type to "full"', param="model")


def _file_name(layer: str) -> str:
    return f"base_model.model.{layer}.lora_A.weight"


def _rename_as_loaded(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers

    found: dict[str, Tensor] = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), dict(weights))
    return found


def _is_refused(model: nn.Module, name: str) -> bool:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba

    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rpartition(".")[2])
    except ValueError:
        return True
    return False
