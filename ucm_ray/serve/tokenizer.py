"""Tokenising once, in the ingress: the same renderer and chat template as the engine's, and the ids go along."""

from typing import Any

from ray.llm._internal.serve.core.configs.llm_config import LLMConfig
from ray.llm._internal.serve.routing_policies.kv_aware.vllm.tokenizer import TokenizeError, Tokenizer

from ucm_ray.serve.errors import ServiceError


class PromptTokenizer:
    """Prompts and documents to token ids for one model."""

    def __init__(self, llm_config: LLMConfig):
        self._tokenizer = Tokenizer(llm_config)
        # the renderer's own: Ray's wrapper has no way to tokenise a bare text
        self._text_tokenizer = self._tokenizer._renderer.renderer.tokenizer
        self.vocabulary_size = len(self._text_tokenizer)

    async def prompt(self, payload: dict[str, Any]) -> list[int] | None:
        """Ids of a request body with `messages` or one text as `prompt`, exactly as the engine would make them.

        None where one list of ids cannot say it all: several prompts, content parts (images), tools. Raises
        `ServiceError` 400 where the engine would refuse.
        """
        if payload.get("tools") or not all(
            isinstance(message.get("content"), str) for message in payload.get("messages") or ()
        ):
            return None
        if payload.get("prompt") is not None and not isinstance(payload["prompt"], str):
            return None
        try:
            return await self._tokenizer.tokenize(payload)
        except TokenizeError as error:
            field = "messages" if payload.get("messages") else "prompt"
            raise ServiceError(error.status_code, error.message, field) from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """As a Hugging Face tokenizer's."""
        return self._text_tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def text(self, text: str) -> list[int]:
        """Ids of a bare text, without special tokens."""
        return self.encode(text)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """The text of every token, for showing a prompt token by token."""
        return [self._text_tokenizer.decode([token_id]) for token_id in token_ids]
