"""KV below the GPU's pool: host memory and files of a node, in a process that outlives its engine."""
