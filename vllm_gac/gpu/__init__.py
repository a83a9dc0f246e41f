"""What a profile says about a GPU: times of linears and attention, and the fastest kernels."""
