"""Hugging Face Trainer: a callback that leaves padding out and adds a line to a file at every logging step."""

import json

from transformers import TrainerCallback

from rankscope import blockstats


def without_padding(args, kwargs, output):
    mask = kwargs["attention_mask"]  # of the model: (batch, 1, query, key), True to attend; None without padding
    return output, args[0], None if mask is None else mask.any(-2).squeeze(1)


class BlockStatistics(TrainerCallback):
    def __init__(self, blocks, width, path):
        self.stats, self.path = blockstats.attach(blocks, width, stream=without_padding), path

    def on_step_begin(self, args, state, control, **kwargs):
        self.stats.count()

    def on_step_end(self, args, state, control, **kwargs):
        if (state.global_step) % args.logging_steps == 0:
            row = self.stats.flush()  # on every rank
            if state.is_world_process_zero:
                with open(self.path, "a") as file:
                    file.write(json.dumps({"step": state.global_step, **row}) + "\n")
