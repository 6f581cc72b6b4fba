"""A plain loop with DDP: every second step counts, every fourth writes a line for ``rankscope report FILE.jsonl``."""

import json

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from rankscope import blockstats


def train(model, width, loader, path):
    stats = blockstats.attach(model.layers, width)  # before DDP and torch.compile
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step, ids in enumerate(loader):
        stats.count(step % 2 == 0)
        loss = cross_entropy(ddp(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 0:
            row = stats.flush()  # on every rank
            if dist.get_rank() == 0:
                with open(path, "a") as file:
                    file.write(json.dumps({"step": step, "loss": loss.item(), **row}) + "\n")
