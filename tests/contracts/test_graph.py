"""A block of any family, recorded and replayed on other numbers, computes what the block itself computes on them.

The numbers are close enough to those of the recording that routers choose the same experts, which a replay keeps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.models.wrapping import hidden
from rankscope.pass_graph.ir import Value
from rankscope.pass_graph.record import GraphRecorder
from rankscope.pass_graph.replay import content_of, replay, result_of, unlike
from rankscope.stream.frames import first_tensor, output_tensor, with_another
from rankscope.stream.viewing import undisturbed, view_of
from tests.contracts.test_families import NOT_FOUND
from tests.families import without_relatives
from tests.tiny_presets import TINY_PRESETS


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", without_relatives(TINY_PRESETS))
def test_a_replay_is_the_block(name: str) -> None:
    if name in NOT_FOUND:
        return
    loaded = load(f"init:{name}")
    (batch, *_) = prepare_inputs(loaded, None, sequences=2, tokens=12, batch=2, tokens_policy="content", seed=0)
    with undisturbed(loaded.model):
        call = view_of(loaded.model, batch).stacks[0].calls[0]
        block, recorder = loaded.model.get_submodule(call.module_name), GraphRecorder()
        taken: list[Value] = []
        replayed: list[Tensor] = []

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            with hidden():
                entry = first_tensor(args, kwargs)
                if entry is not None and not taken:
                    recorder.keeps = True
                    recorder.forget()
                    taken.append(recorder.value_of(entry))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            with hidden():
                if recorder.keeps:
                    out = output_tensor(output)
                    assert out is not None
                    for node in recorder.graph.nodes:
                        made = [] if node.name.startswith(("empty", "new_empty")) else result_of(node, {})
                        for value, once_more in zip(node.outputs, made, strict=False):
                            assert once_more is None or not unlike(content_of(value, {}), once_more), node.name
                    other = replay(recorder.graph.nodes, {taken[0]: 1.01 * content_of(taken[0], {})})
                    replayed.append(content_of(recorder.value_of(out), other))
                    recorder.keeps = False

        hooks = [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
        with recorder:
            batch.run(loaded.model)
        for hook in hooks:
            hook.remove()

        ran: list[Tensor] = []

        def scale(module: nn.Module, args: Any, kwargs: Any) -> Any:
            entry = first_tensor(args, kwargs)
            return None if entry is None or ran else with_another((args, kwargs), entry, 1.01 * entry)

        hooks = [
            block.register_forward_pre_hook(scale, with_kwargs=True),
            block.register_forward_hook(lambda module, args, output: ran.append(output_tensor(output))),
        ]
        batch.run(loaded.model)
        for hook in hooks:
            hook.remove()
    torch.testing.assert_close(replayed[0], ran[0])
