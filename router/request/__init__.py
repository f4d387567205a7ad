"""One request from its first attempt to its last byte."""
