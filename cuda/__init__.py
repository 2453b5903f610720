"""CUDA and C++ sources of the kernels, shipped as package data (`horovod_aps.cuda`)."""
