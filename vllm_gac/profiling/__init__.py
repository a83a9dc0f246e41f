"""Measuring a GPU: the sweeps of a GpuProfile, from its copy bandwidth to decode attention."""
