"""Says why a model cannot run on its inputs, if torch raises the error and not the model's own code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from rankscope.errors import InputError
from rankscope.models.wrapping import needs_all_ranks


def why_it_fails(model: nn.Module, batch: Any) -> InputError | None:
    """The error that torch raises for ``batch.call(model)`` where no code of rankscope runs inside the model.

    What the model's own code raises is left as it is; then, and if the model runs, there is None to say.
    """
    if needs_all_ranks(model) or any(tensor.device.type == "cuda" for tensor in model.parameters()):
        return None  # other processes would have to run as well; a failed kernel leaves the device unusable
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.no_grad(),
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
        ):
            batch.call(model)
    except Exception as error:  # noqa: BLE001  (whatever it raises is reported)
        # Two of ours call the model: this function and the batch. More are hooks or modes inside it.
        names = [str(frame.f_globals.get("__name__", "")) for frame, _ in traceback.walk_tb(error.__traceback__)]
        roots = [name.partition(".")[0] for name in names]
        told = " ".join(str(error).split())[:300].rstrip(".")
        given = [value for value in (*batch.arguments, *batch.inputs.values()) if isinstance(value, Tensor)]
        tables = _tables(model)
        # A model that adds a slice of its position table to longer inputs fails in its own code, at that addition: the
        # error names the length of the inputs and the smaller number of rows of a table.
        numbers = {int(number) for number in re.findall(r"\d{1,9}", told)}
        lengths = {size for value in given for size in value.shape}
        beyond = any(length > rows for length in lengths & numbers for rows in numbers & set(tables.values()))
        if (roots[-1] == "torch" or beyond) and roots.count("rankscope") <= 2:
            sizes = _sizes(given, tables) if beyond or isinstance(error, IndexError) else ""
            return InputError(
                f"{type(model).__name__} cannot run on these inputs: {type(error).__name__}: {told}.{sizes} Pass what "
                "it runs on when you call it yourself."
            )
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
    return None


def _tables(model: nn.Module) -> dict[str, int]:
    """Numbers of rows of embeddings, and of matrices that a module of the model's own holds, as for positions."""
    return {
        f"{name}.{key}".lstrip("."): parameter.shape[-2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or not type(module).__module__.startswith("torch.")
        for key, parameter in module.named_parameters(recurse=False)
        if parameter.ndim in (2, 3)
    }


def _sizes(given: Sequence[Tensor], tables: Mapping[str, int]) -> str:
    """The largest id, the shapes of the inputs, and the numbers of rows in which the model looks something up."""
    ids = [int(value.max()) for value in given if value.numel() and not value.is_floating_point()]
    rows = ", ".join(f"{count:,} ({name})" for name, count in tables.items())
    largest = f" The largest id is {max(ids):,}, in inputs of shape {tuple(given[0].shape)}." if ids else ""
    return f"{largest} Its tables have {rows} rows." if tables else largest
