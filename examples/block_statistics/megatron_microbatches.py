"""Microbatches as Megatron runs them: the stream is (sequence, batch, hidden), by name, in a tuple."""

from rankscope import blockstats


def stream(args, kwargs, output):
    before = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return output[0].transpose(0, 1), before.transpose(0, 1)


def train(layers, hidden_size, forward_step, microbatches, optimizer, log, *, first=0, total=None, group=None):
    # `first` is the number of the first layer of this pipeline stage. With --sequence-parallel, give a window.
    numbered = {first + number: layer for number, layer in enumerate(layers)}
    stats = blockstats.attach(numbered, hidden_size, total=total, stream=stream)
    for step, batch in enumerate(microbatches):
        stats.count(step % 2 == 0)
        for microbatch in batch:  # what the schedule of Megatron does
            (forward_step(microbatch) / len(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            log(step, stats.flush(group))
