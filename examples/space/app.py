"""The playground for a public space: copy this folder there.

Every value a visitor sends is checked on the server (``rankscope.ext.playground.choices``), two simulations run at a
time, and at most 64 requests wait. A space sets ``GRADIO_SERVER_NAME``; elsewhere the page stays on this machine.
"""

from __future__ import annotations

import os

import torch

from rankscope.ext.playground import AT_ONCE, LOCAL, serve

if __name__ == "__main__":
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // AT_ONCE))
    serve(
        os.environ.get("GRADIO_SERVER_NAME", LOCAL), int(os.environ.get("GRADIO_SERVER_PORT", "7860")), announce=print
    )
