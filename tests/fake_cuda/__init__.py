"""Code for GPUs, executed with the stand-in for ``torch.cuda`` of tests/helpers/fake_cuda.py."""
