"""torch.distributed.device_mesh's path: `DeviceMesh` and `init_device_mesh` of `unisono`."""

from unisono.core.c10d.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
