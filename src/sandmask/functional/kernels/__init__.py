"""Triton kernels on tensors of K runs, one file per operation. Each has a twin in plain torch, and tests compare them.

They are imported only where they run: Triton may be missing.
"""
