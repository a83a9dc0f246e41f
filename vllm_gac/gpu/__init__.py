"""What a profile says about a GPU: times of GEMMs and attention, and the fastest kernels."""
