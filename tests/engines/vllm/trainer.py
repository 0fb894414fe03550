"""What trainers put into a worker, to send it weights between requests."""

from __future__ import annotations

from typing import Any

from safetensors.torch import load_file


class Trainer:
    """For `worker_extension_cls`."""

    model_runner: Any

    def load(self, folder: str) -> int:
        """The model's own loader, with a checkpoint's tensors. Returns how many parameters it set."""
        return len(self.model_runner.get_model().load_weights(load_file(f"{folder}/model.safetensors").items()))
