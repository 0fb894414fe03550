"""In each of the engine's processes, before anything else.

Names of torchvision's operators, so that the package can be imported beside a torch without CUDA. And what a test pretends:
PRETEND_TESTED=version, that the adapter was tested with that SGLang only; PRETEND_PAST=1, that SGLang calls its layers past
their hooks; PRETEND_GRAPHS=1, that CPUs capture graphs (graphs.py); PRETEND_SHORT=layers, that rank 1 has no memory for more of
them to leave.
"""

import os

import torch

_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if os.environ.get("PRETEND_TESTED"):
    from remap.adapters.sglang import versions

    versions.TESTED = os.environ["PRETEND_TESTED"]
if os.environ.get("PRETEND_PAST"):
    from remap.adapters.sglang import hooks

    hooks.attach_hooks = lambda layers, tenant: None
if os.environ.get("PRETEND_GRAPHS"):
    import graphs

    graphs.pretend()
if os.environ.get("PRETEND_SHORT"):
    from remap import errors, ranks

    go = ranks.Rank._go

    def short(rank, target):
        if rank.rank and target[0] > int(os.environ["PRETEND_SHORT"]):
            raise errors.OutOfMemory("no memory, as was pretended")
        go(rank, target)

    ranks.Rank._go = short
