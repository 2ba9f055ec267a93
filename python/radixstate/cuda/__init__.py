"""The codec on CUDA: `build` makes it for two pools. Importing this needs torch, but neither CuPy nor a device."""

from radixstate.cuda.batch import Batch, Verdicts
from radixstate.cuda.codec import CudaCodec, build, describe
from radixstate.cuda.device import CupyDevice, Device

__all__ = ["Batch", "CudaCodec", "CupyDevice", "Device", "Verdicts", "build", "describe"]
