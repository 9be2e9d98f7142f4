"""A Llama-architecture model: small with seeded random weights, or from a local folder. Needs torch, transformers."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

# Nothing here may reach for a network: a model is a local folder or made from a seed.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from kvxfer.errors import GeometryError

VOCABULARY = 1024
# With the usual 0.02 so small a model repeats one token whatever it is asked; at 0.1 all tokens depend on the cache.
INITIALIZER_RANGE = 0.1


class Model:
    """One model in this process, in float32 on one thread, so that two processes compute the same bits."""

    def __init__(self, path: Path | None, seed: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        if path is None:
            config = LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=128,
                intermediate_size=344,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=2,
                max_position_embeddings=8192,
                initializer_range=INITIALIZER_RANGE,
            )
            self._model: Any = LlamaForCausalLM(config)
        else:
            self._model = AutoModelForCausalLM.from_pretrained(str(path), local_files_only=True)
        self._finish()

    @classmethod
    def with_other_weights(cls, path: Path | None, seed: int) -> Model:
        """The same architecture with random weights from another seed: what it computes is of no use to the first."""
        if path is None:
            return cls(None, seed)
        torch.manual_seed(seed)
        model = cls.__new__(cls)
        model._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(path), local_files_only=True))
        model._finish()
        return model

    def _finish(self) -> None:
        self._model = self._model.float().eval()
        names = inspect.signature(self._model.forward).parameters
        self._cache_argument = "cache" if "cache" in names else "past_key_values"

    @property
    def vocabulary(self) -> int:
        return int(self._model.config.vocab_size)

    @property
    def layers(self) -> int:
        return int(self._model.config.num_hidden_layers)

    def page_shape(self) -> tuple[int, int]:
        """(key-value heads, head dimension) of every layer's K and V. Raises GeometryError where they are not alike."""
        keys_and_values, _ = self.prefill([0])
        shapes = {(tensor.shape[1], tensor.shape[2]) for pair in keys_and_values for tensor in pair}
        if len(shapes) != 1:
            raise GeometryError("the demo needs K and V of one shape in all layers", shapes=sorted(shapes))
        return shapes.pop()

    def prefill(self, prompt: list[int]) -> tuple[list[tuple[Any, Any]], int]:
        """Computes the prompt. Returns each layer's K and V as float32 arrays [tokens, heads, dim], and one token."""
        cache = DynamicCache(config=self._model.config)
        token = self._step(prompt, cache)
        layers = [
            (layer.keys[0].transpose(0, 1).contiguous().numpy(), layer.values[0].transpose(0, 1).contiguous().numpy())
            for layer in cache.layers
        ]
        return layers, token

    def continue_from(self, layers: list[tuple[Any, Any]], token: int, n_tokens: int) -> list[int]:
        """Greedy decode: ``token`` first, then ``n_tokens - 1`` more, on a cache given as ``prefill`` returns it."""
        cache = DynamicCache(config=self._model.config)
        for index, (keys, values) in enumerate(layers):
            cache.update(*(torch.from_numpy(part).transpose(0, 1).unsqueeze(0) for part in (keys, values)), index)
        return self._greedy(cache, token, n_tokens)

    def alone(self, prompt: list[int], n_tokens: int) -> list[int]:
        """Prefill and greedy decode in this process: what the handoff must reproduce."""
        cache = DynamicCache(config=self._model.config)
        return self._greedy(cache, self._step(prompt, cache), n_tokens)

    def _greedy(self, cache: Any, token: int, n_tokens: int) -> list[int]:
        tokens = [token]
        while len(tokens) < n_tokens:
            tokens.append(self._step([tokens[-1]], cache))
        return tokens

    def _step(self, tokens: list[int], cache: Any) -> int:
        with torch.inference_mode():
            output = self._model(torch.tensor([tokens]), use_cache=True, **{self._cache_argument: cache})
        return int(output.logits[0, -1].argmax())


def random_prompt(n_tokens: int, vocabulary: int, seed: int) -> list[int]:
    """A prompt of seeded random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(vocabulary, (n_tokens,), generator=generator)]
