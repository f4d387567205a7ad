"""One node: an HTTP process and an engine process with its connector, whatever the role."""
