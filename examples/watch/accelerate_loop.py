import torch
from accelerate import Accelerator
from toy import ids, llama

import rankscope as rs

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader(ids(), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
watch = rs.watch(model, optimizer, accelerator=accelerator)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
