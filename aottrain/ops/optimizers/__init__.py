"""Steps of optimizers in eager torch: plain references beside the generated kernels, and what other engines run."""
