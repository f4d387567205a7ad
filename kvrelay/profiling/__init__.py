"""Measurements for `kvrelay profile` and benchmarks: engine steps, and transfers of KV."""
