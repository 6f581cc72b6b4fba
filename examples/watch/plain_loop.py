import torch
from toy import ids, llama

import rankscope as rs

model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
watch = rs.watch(model, optimizer)
for batch in ids().split(8):
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
