"""A stand-in for a tensor on a GPU."""

import torch


class Remote(torch.Tensor):
    """A tensor that, as one on a GPU, is no array before it is copied to the host."""

    def __array__(self, *_, **__):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def numpy(self, *, force=False):
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.as_subclass(torch.Tensor).numpy(force=True)
