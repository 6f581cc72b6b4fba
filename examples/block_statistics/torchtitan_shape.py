"""torchtitan's shape, FSDP2 x TP x PP: what its trainer would add, around `pp_schedule.step` and `MetricsProcessor`."""

from rankscope import blockstats


def train(model_parts, width, total, pp_schedule, optimizers, metrics_processor, loader, *, is_first, is_last):
    # torchtitan's blocks are `layers`, a ModuleDict whose keys are their numbers in the whole model. Parallelize first;
    # compiled blocks are compiled at their first call. Under sequence parallelism, give a window.
    blocks = {int(number): block for part in model_parts for number, block in part.layers.items()}
    stats = blockstats.attach(blocks, width, total=total)
    for step, ids in enumerate(loader, start=1):
        # The first step of a schedule runs each stage once on memory without values.
        stats.count(step > 1 and metrics_processor.should_log(step))
        losses = []
        inputs = (ids,) if is_first else ()
        pp_schedule.step(*inputs, **({"target": ids, "losses": losses} if is_last else {}))
        optimizers.step()
        optimizers.zero_grad()
        if step > 1 and metrics_processor.should_log(step):
            loss = sum(one.item() for one in losses) / len(losses) if is_last else -1.0
            metrics_processor.log(step, loss, loss, 0.0, extra_metrics=stats.flush())
