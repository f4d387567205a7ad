"""KV below the GPU's pool: host memory and files of a node, in a process that outlives its engine.

To engines it is one more peer that has blocks (kv_transfer), and it knows no model.
"""
