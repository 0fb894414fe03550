"""In each of the engine's processes, before anything else.

Names of torchvision's operators, so that the package can be imported beside a torch without CUDA. And what a test pretends:
PRETEND_TESTED=version, that the adapter was tested with that SGLang only; PRETEND_PAST=1, that SGLang calls its layers past
their hooks; PRETEND_GRAPHS=1, that CPUs capture graphs (graphs.py).
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
