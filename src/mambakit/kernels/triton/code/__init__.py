"""The kernels themselves, in Triton's language. Importing a file here needs Triton; nothing but a launch does."""
