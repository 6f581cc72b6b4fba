"""One forward pass as plain data: what was computed, from what, and in which module; and any part of it once more.

A pass of a block that computes ``x = x + attention(norm(x))``, with ``attention(h) = softmax(h h.T) h W``, becomes::

    value  made by                      what it is
    -----  ---------------------------  ---------------------------------------------------------------
    v0     nothing that was recorded    x, given to the call of the block
    v1     native_layer_norm(v0, g, b)  norm(x); g and b are values too, which nothing made
    v2     transpose(v1)                a view: its tensor shares the memory of that of v1
    v3     bmm(v1, v2)                  the scores
    v4     _softmax(v3)
    v5     bmm(v4, v1)                  a mean of the tokens for each token
    v6     bmm(v5, W)                   what attention returns
    v7     add(v0, v6)                  x + attention(norm(x)), returned by the call of the block

- A ``Value`` is the content of a tensor at one moment. A tensor that is written to in place
  has a new value from then on, and so has every other tensor in the same memory, made by a node of its own. Had the
  block written ``x += ...`` while ``y`` is a view of ``x``, ``add(v0, v6)`` would make v7, and ``SharedMemory(y, v7)``
  v8, which is what ``y`` holds afterwards.
- A ``Node`` is one operation that was executed, below autograd: ``nn.MultiheadAttention`` is
  as many nodes as its parts, ``flex_attention`` and other operators that take functions are one each. It knows the
  function that the author of the model called (``x @ W`` is ``matmul``) and the call of a module in which it ran.
- A ``Call`` is one call of a module, with its values on entry and on return.

``GraphRecorder`` records, and ``replay`` answers the one
question that is asked of a graph: *these values are replaced; what else changes?* It computes the nodes that depend on
them once more. ``changed`` compares with a control, the same replay with nothing replaced.
"""
