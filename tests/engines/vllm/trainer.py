"""What trainers put into a worker, to send it weights between requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload


class Trainer:
    """For `worker_extension_cls`."""

    model_runner: Any

    def load(self, folder: str) -> int:
        """The model's own loader, with a checkpoint's tensors. Returns how many parameters it set."""
        return len(self.model_runner.get_model().load_weights(load_file(f"{folder}/model.safetensors").items()))


@dataclass
class Nothing:
    """To begin with."""


@dataclass
class Chunk:
    """Every `of`-th tensor of a checkpoint."""

    folder: str
    number: int
    of: int


class FolderEngine(WeightTransferEngine):
    """As vLLM's own over NCCL: layerwise, in the checkpoint's format, in chunks. For `weight_transfer_config`, as "folder"."""

    init_info_cls, update_info_cls = Nothing, Chunk

    def init_transfer_engine(self, init_info: Nothing) -> None:
        pass

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))  # there is no device to wait for

    def receive_weights(self, update_info: Chunk) -> None:
        tensors = sorted(load_file(f"{update_info.folder}/model.safetensors").items())
        self.model.load_weights(tensors[update_info.number :: update_info.of])

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine("folder", FolderEngine)
