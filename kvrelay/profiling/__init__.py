"""Measurements for `kvrelay profile` and benchmarks: steps of an engine, and transfers of its KV."""
