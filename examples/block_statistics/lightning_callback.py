"""Lightning: a callback; `blocks` are the layers inside the module, before it is compiled."""

import lightning

from rankscope import blockstats


class BlockStatistics(lightning.Callback):
    def __init__(self, blocks, width, every=10, log_every=100):
        self.blocks, self.width, self.every, self.log_every = blocks, width, every, log_every

    def on_fit_start(self, trainer, module):
        self.stats, self.flushed = blockstats.attach(self.blocks, self.width), 0

    def on_train_batch_start(self, trainer, module, batch, index):
        self.stats.count(trainer.global_step % self.every == 0)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        step = trainer.global_step  # the same for several batches if gradients are accumulated
        if step % self.log_every == 0 and step != self.flushed:
            self.flushed = step
            trainer.logger.log_metrics(self.stats.flush(), step)

    def on_fit_end(self, trainer, module):
        self.stats.detach()
