"""Triton kernels on tensors of K runs, one file per operation. Tests compare each kernel with an equivalent in torch.

The kernels are imported only when they are used, because Triton may not be installed.
"""
