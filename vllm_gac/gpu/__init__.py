"""What a profile says about a GPU: times of linear layers and attention, and fastest kernels."""
