"""How the forward passes of a verb are run: in memory, block by block (offload), or over ranks."""
