"""OpenAI's API: text, images, videos, speech, files and batches."""

from __future__ import annotations

from typing import Final

from litestar.types import ControllerRouterHandler

from gateway.api.openai.batches import BatchesController
from gateway.api.openai.chat import ChatController
from gateway.api.openai.completions import CompletionsController
from gateway.api.openai.embeddings import EmbeddingsController
from gateway.api.openai.files import FilesController
from gateway.api.openai.images import ImagesController
from gateway.api.openai.organization import OrganizationController
from gateway.api.openai.rerank import RerankController
from gateway.api.openai.responses import ResponsesController
from gateway.api.openai.speech import SpeechController
from gateway.api.openai.transcriptions import TranscriptionsController
from gateway.api.openai.videos import VideosController
from gateway.api.openai.voices import VoiceConsentsController, VoicesController

HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    BatchesController,
    CompletionsController,
    EmbeddingsController,
    OrganizationController,
    RerankController,
)

MEDIA_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (
    ChatController,
    ImagesController,
    ResponsesController,
    SpeechController,
    TranscriptionsController,
    VideosController,
    VoiceConsentsController,
    VoicesController,
)
"""Handlers whose bodies can contain files."""

FILE_HANDLERS: Final[tuple[ControllerRouterHandler, ...]] = (FilesController,)
"""Handlers whose bodies are files."""
