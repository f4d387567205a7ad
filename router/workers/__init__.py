"""Several router processes on one port: a parent, which looks after nodes, and its workers."""
