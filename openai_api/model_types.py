"""Models, adapters and tokenization: requests and answers as typed values."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace

from kvrelay.openai_api.types import NotEmpty, ShortText
from kvrelay.wire.config_checks import Count
from kvrelay.wire.json_object import JsonObject

__all__ = [
    "AdapterAnswer",
    "DetokenizeRequest",
    "LoadAdapterRequest",
    "ModelCard",
    "NodeAnswer",
    "TokenizeRequest",
    "TokenizeResponse",
    "UnloadAdapterRequest",
    "model_list",
]


class ModelCard(Struct, frozen=True):
    """A served model, for OpenAI's and Anthropic's clients.

    `parent` is an adapter's base model, `root` an alias's model.
    """

    id: str
    created: int
    max_model_len: int
    display_name: str
    created_at: str
    object: str = "model"
    owned_by: str = "kvrelay"
    type: str = "model"
    lifecycle: str = "active"
    parent: str | UnsetType = UNSET
    root: str | UnsetType = UNSET

    @classmethod
    def create(cls, name: str, created: int, max_model_len: int) -> ModelCard:
        return cls(
            name, created, max_model_len, name, datetime.fromtimestamp(created, UTC).isoformat()
        )

    def named(
        self, name: str, *, parent: str | UnsetType = UNSET, root: str | UnsetType = UNSET
    ) -> ModelCard:
        return replace(
            self,
            id=name,
            display_name=name,
            parent=self.parent if parent is UNSET else parent,
            root=root,
        )


def model_list(cards: list[ModelCard]) -> JsonObject:
    return {
        "object": "list",
        "data": cards,
        "first_id": cards[0].id if cards else None,
        "last_id": cards[-1].id if cards else None,
        "has_more": False,
    }


class TokenizeRequest(Struct, frozen=True):
    """A body of POST /tokenize, beside the fields of a completion or chat."""

    model: str | None = None
    messages: msgspec.Raw = msgspec.Raw()  # a router does not read them
    return_token_strs: bool | None = None

    @property
    def is_chat(self) -> bool:
        return bytes(self.messages).strip() not in (b"", b"null")


class TokenizeResponse(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Struct, frozen=True):
    tokens: list[Count]
    model: str | None = None


class LoadAdapterRequest(Struct, frozen=True):
    """A body of POST /v1/load_lora_adapter: a folder on each node."""

    lora_name: ShortText
    lora_path: NotEmpty
    load_inplace: bool = False


class UnloadAdapterRequest(Struct, frozen=True):
    lora_name: str


class NodeAnswer(Struct, frozen=True):
    url: str
    role: str
    status: int
    message: str


class AdapterAnswer(Struct, frozen=True):
    lora_name: str
    message: str
    nodes: list[NodeAnswer] | UnsetType = UNSET
